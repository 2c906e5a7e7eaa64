"""Damaged checkpoints are refused by every command, with the name of the file or tensor."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.weights.hf.checksums import MANIFEST, read_manifest
from tests.checkpoint_tools.conftest import run
from tests.support.corruption import SHOWN_BY_STRUCTURE, Damage, flip
from tests.support.tiny_models import write_model

COMMANDS: dict[str, list[str]] = {
    "hf": ["verify", "from-hf", "to-fp8"],
    "torch_dist": ["verify", "to-hf"],
    "fp8": ["verify", "dequantize"],
}


def refused(name: str, folder: Path, source: Path, out: Path) -> bool:
    """Whether the command ends with the status of damaged input and leaves no result."""
    arguments = {
        "verify": (folder,),
        "to-hf": (folder, out, "--source-hf", source),
        "from-hf": (folder, out),
        "to-fp8": (folder, out),
        "dequantize": (folder, out),
    }
    status = run(name, *arguments[name])
    shutil.rmtree(out.with_name(out.name + ".partial"), ignore_errors=True)
    return status == 2 and not out.exists()


def damage_and_run(
    kind: str, original: Path, source: Path, tmp_path: Path, seed: int, capsys: Any
) -> str:
    """Damage a copy of `original`; return "" if it was refused by name, otherwise what happened."""
    rng = random.Random(seed)
    folder, out = tmp_path / "damaged", tmp_path / "out"
    shutil.copytree(original, folder)
    if rng.random() < 0.3:
        name, damage = "verify", flip(folder, rng)
    else:
        name = rng.choice(COMMANDS[kind])
        (folder / MANIFEST).unlink()
        damage = rng.choice(SHOWN_BY_STRUCTURE["torch_dist" if kind == "torch_dist" else "hf"])(
            folder, rng
        )
    capsys.readouterr()
    was_refused = refused(name, folder, source, out)
    error = capsys.readouterr().err
    shutil.rmtree(folder)
    shutil.rmtree(out, ignore_errors=True)
    return (
        ""
        if was_refused and names(error, damage)
        else f"seed {seed}, {name}: {damage.what}: {error!r}"
    )


def names(error: str, damage: Damage) -> bool:
    """Whether it is one message that has one of the words, not a traceback."""
    one_line = error.count("\n") == 1 and "Traceback" not in error
    return any(word in error for word in damage.words) and one_line


@pytest.mark.gloo
@pytest.mark.parametrize("seeds", [range(24), pytest.param(range(24, 200), marks=pytest.mark.slow)])
def test_damage_is_refused_by_name(
    saved: Path, tmp_path: Path, capsys: Any, seeds: Sequence[int]
) -> None:
    originals = {"hf": saved / "exported", "torch_dist": saved / "qwen3_moe/step"}
    missed = []
    for seed in seeds:
        kind = tuple(originals)[seed % 2]
        place = (kind, originals[kind], saved / "qwen3_moe/hf", tmp_path)
        missed += [text] if (text := damage_and_run(*place, seed, capsys)) else []
    assert not missed, f"{len(missed)} of {len(seeds)}:\n" + "\n".join(missed)
    assert not (tmp_path / "ran").exists()


def test_damage_to_a_quantized_model_is_refused_by_name(tmp_path: Path, capsys: Any) -> None:
    hf, fp8 = write_model("qwen3_moe", tmp_path / "hf"), tmp_path / "fp8"
    assert run("to-fp8", hf, fp8, "--max-file-bytes", "200KB") == 0
    missed = [
        text for s in range(60) if (text := damage_and_run("fp8", fp8, hf, tmp_path, s, capsys))
    ]
    assert not missed, f"{len(missed)} of 60:\n" + "\n".join(missed)


@pytest.mark.gloo
@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 40), marks=pytest.mark.slow)])
def test_a_flipped_bit_is_refused_or_without_effect(
    saved: Path, tmp_path: Path, capsys: Any, seeds: Sequence[int]
) -> None:
    """Without checksums.json some bits of headers mean nothing, but no tensor is ever altered."""
    step, source, folder, out = (
        saved / "qwen3_moe/step",
        saved / "qwen3_moe/hf",
        tmp_path / "f",
        tmp_path / "o",
    )
    statuses = []
    for seed in seeds:
        shutil.copytree(step, folder)
        (folder / MANIFEST).unlink()
        damage = flip(folder, random.Random(seed))
        statuses.append(run("to-hf", folder, out, "--source-hf", source))
        assert "Traceback" not in capsys.readouterr().err
        if statuses[-1] == 0:
            assert tensor_sums(out) == tensor_sums(saved / "in_hf_names"), damage
        for path in (folder, out, out.with_name(out.name + ".partial")):
            shutil.rmtree(path, ignore_errors=True)
    assert 0 < statuses.count(2) < len(seeds), statuses


def tensor_sums(folder: Path) -> list[Any]:
    sums = read_manifest(folder)
    assert sums is not None
    return [entry for name, entry in sums.items() if name.endswith(".safetensors")]


@pytest.mark.gloo
def test_undamaged_copies_are_accepted(saved: Path, tmp_path: Path) -> None:
    """The same folders without damage are accepted, so the other test refuses the damage."""
    for number, original in enumerate((saved / "exported", saved / "qwen3_moe/step")):
        for with_sums in (True, False):
            folder = tmp_path / f"{number}{with_sums}"
            shutil.copytree(original, folder)
            if not with_sums:
                (folder / MANIFEST).unlink()
            assert run("verify", folder) == 0
