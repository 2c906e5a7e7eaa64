"""Megatron's own checkpoints to HuggingFace and back: nothing is lost, in any family and layout."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from checkpoint_tools.cli import main
from mcore_rl.weights.hf.checksums import MANIFEST, read_manifest
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.opened import open_hf_dir
from tests.checkpoint_tools.conftest import LAYOUTS, write_source
from tests.house.test_documents import commands
from tests.support.policy import read
from tests.support.small_hf import assert_equal, read_all

QUICK = ("deepseek_v3",)
"""Families of `make test`."""


@pytest.mark.gloo
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK))
        for kind in LAYOUTS
        if kind != "qwen3_moe"
    ],
)
def test_a_model_goes_through_megatron_and_comes_back(
    saved: Path, tmp_path: Path, command: Any, kind: str
) -> None:
    """from-hf, dist_checkpointing.load, dist_checkpointing.save, to-hf."""
    source = saved / kind / "hf"
    assert command("to-hf", saved / kind / "step", tmp_path / "out", "--source-hf", source) == 0
    assert_equal(tmp_path / "out", source)
    written, original = ModelFacts.read(tmp_path / "out"), ModelFacts.read(source)
    assert open_hf_dir(written).keys() == open_hf_dir(original).keys()
    assert command("verify", saved / kind / "step", saved / kind / "megatron") == 0
    assert command("verify", saved / kind / "megatron", source) == 0


@pytest.mark.gloo
def test_a_trained_model_is_merged_as_the_trainer_exports_it(
    saved: Path, tmp_path: Path, command: Any, capsys: Any
) -> None:
    step, exported, source = saved / "qwen3_moe/step", saved / "exported", saved / "qwen3_moe/hf"
    out = tmp_path / "out"
    assert command("to-hf", step, out, "--source-hf", source, "--max-file-bytes", "200KB") == 0
    assert len(list(out.glob("*.safetensors"))) > 2
    assert_equal(out, exported)
    assert command("verify", out, exported) == 0
    assert command("verify", step, exported) == 0
    capsys.readouterr()
    assert command("verify", step, saved / "qwen3_moe/megatron") == 1
    assert "elements differ, the first at [0" in capsys.readouterr().out
    assert command("verify", step, saved / "qwen3_moe/hf", "--json") == 1
    verdict = json.loads(capsys.readouterr().out)
    assert not verdict["equal"]
    assert len(verdict["differences"]) > 10
    assert len(verdict["crc32"]) == verdict["num_tensors"]


@pytest.mark.gloo
def test_training_goes_on_from_a_checkpoint_that_went_through_hf_names(
    saved: Path, command: Any
) -> None:
    for straight, resumed in pickle.loads((saved / "resumed.pickle").read_bytes()):
        assert straight == resumed
    names = {name.partition(".")[0] for name in read_all(saved / "adam")}
    assert names == {"param", "exp_avg", "exp_avg_sq"}
    assert command("verify", saved / "resumed", saved / "qwen3_moe/step", "--optimizer") == 0
    assert command("verify", saved / "adam") == 0


@pytest.mark.gloo
def test_the_trainer_writes_checksums_of_every_byte(saved: Path) -> None:
    for folder in (saved / "qwen3_moe/step", saved / "exported", saved / "critic/exported"):
        sums = read_manifest(folder)
        assert sums is not None
        files = {
            path.name: path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST
        }
        assert {name: entry.num_bytes for name, entry in sums.items()} == files
    assert not list(saved.glob("*/*/*.distcp.checksums.json"))


def test_changed_on_purpose_then_summed_anew(tmp_path: Path, command: Any, capsys: Any) -> None:
    folder = write_source("qwen2", tmp_path / "hf")
    assert command("verify", folder) == 0
    assert "came without checksums" in capsys.readouterr().out
    assert command("checksums", folder) == 0
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    assert command("verify", folder) == 2
    assert "config.json has" in capsys.readouterr().err
    assert command("checksums", folder) == 2  # or it would bless damage
    assert "--changed config.json" in capsys.readouterr().err
    assert command("checksums", folder, "--changed", "config.json") == 0
    assert command("verify", folder) == 0


@pytest.mark.gloo
def test_the_documented_commands_run(saved: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """In their order, each with what the ones before made."""
    monkeypatch.chdir(tmp_path)
    places = {
        "runs/grpo/checkpoints/step_000050": "qwen3_moe/step",
        "runs/ppo/checkpoints/critic_000050": "critic/step",
        "runs/sft/hf": "qwen3_moe/hf",
        "dense": "qwen3/hf",
    }
    for place, source in places.items():
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        Path(place).symlink_to(saved / source)
    words = [
        found
        for found in commands(read(Path("docs/checkpoints.md")))
        if found[0] == "mcore-rl-ckpt"
    ]
    assert {line[1] for line in words} >= {
        "to-hf",
        "from-hf",
        "to-fp8",
        "dequantize",
        "inspect",
        "verify",
        "checksums",
    }
    for line in words:
        assert main(line[1:]) == 0, line
