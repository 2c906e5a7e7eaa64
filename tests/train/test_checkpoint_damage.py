"""Checkpoints as megatron-core writes them now, damaged in many ways, are refused before a load."""

import pickle
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from mcore_rl.train.checkpoint_check import check_checkpoint
from mcore_rl.train.checkpoint_save import start_save
from mcore_rl.weights.hf.checksums import MANIFEST
from mcore_rl.weights.megatron_files.metadata import COMMON, COMMON_OBJECT
from tests.support import common_state, corruption
from tests.support.common_state import RAN, read_object, write_object
from tests.support.corruption import Damage, read_metadata
from tests.support.distributed import run_alone


def save_two_steps(root: Path) -> None:
    for step in (3, 4):
        weight = ShardedTensor.from_rank_offsets("weight", torch.arange(600.0) * step, (0, 0, 1))
        rng = ShardedObject("rng", {"python": step}, (1,), (0,))
        common = {"step": step, "extra": {"prompts": {"position": step}}, "layout": {"tp": 1}}
        start_save({"weight": weight, "rng": rng, **common}, root / f"step_{step}").finish(60.0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a checkpoint of two steps of a run, step_3 and step_4, of one rank."""
    root = tmp_path_factory.mktemp("saved")
    run_alone(save_two_steps, root)
    store = f"file://{root}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield root
    dist.destroy_process_group()


def lose_metadata(folder: Path, rng: random.Random) -> Damage:
    (folder / ".metadata").unlink()
    return Damage("no .metadata", (".metadata",))


def swap_with_other_step(folder: Path, rng: random.Random) -> Damage:
    """A file, or the object alone, is the one of another step, of the same size."""
    other = folder.parent / "other"
    if rng.random() < 0.5:
        content = read_object(other)
        assert len(content) == len(read_object(folder)) and content != read_object(folder)
        metadata = (folder / ".metadata").read_bytes()
        file = write_object(folder, content)
        (folder / ".metadata").write_bytes(metadata)
        return Damage("object of another step", (file,))
    path = rng.choice(sorted(other.glob("*.distcp")))
    shutil.copy(path, folder)
    return Damage("file of another step", (path.name,))


WITH_SUMS: Sequence[Callable[[Path, random.Random], Damage]] = (
    *(corruption.flip, corruption.truncate, corruption.lose, corruption.swap_two_files),
    *(lose_metadata, swap_with_other_step),
    *(*common_state.SHOWN_BY_STRUCTURE, *common_state.SHOWN_BY_CONTENT),
)
WITHOUT_SUMS = (
    *(lose_metadata, corruption.dist_foreign_code),
    *(*common_state.SHOWN_BY_STRUCTURE, *common_state.SHOWN_BY_CONTENT),
)


def damage_and_check(saved: Path, root: Path, seed: int) -> str:
    """Damage a copy of a checkpoint; return "" if the check names it, or else what happened."""
    rng = random.Random(seed)
    folder = root / "damaged"
    shutil.copytree(saved / "step_3", folder)
    has_sums = seed % 2 == 0
    if not has_sums:
        (folder / MANIFEST).unlink()
    ways = WITH_SUMS if has_sums else WITHOUT_SUMS
    way = ways[seed // 2 % len(ways)]
    damage = way(folder, rng)
    try:
        check_checkpoint(folder, verify=True)
        said = "accepted"
    except ValueError as error:
        said = str(error)
    shutil.rmtree(folder)
    words = (*damage.words, ".metadata") if has_sums else damage.words  # most ways rewrite it
    is_named = any(word in said for word in words)
    if is_named and "\n" not in said:
        return ""
    return f"seed {seed}, {way.__name__}: {damage.what}: {said}"


@pytest.mark.gloo
@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 260), marks=pytest.mark.slow)])
def test_damage_is_refused_by_name(saved: Path, tmp_path: Path, seeds: Sequence[int]) -> None:
    shutil.copytree(saved / "step_4", tmp_path / "other")
    missed = [text for seed in seeds if (text := damage_and_check(saved, tmp_path, seed))]
    assert not missed, f"{len(missed)} of {len(seeds)}:\n" + "\n".join(missed)
    assert not (tmp_path / RAN).exists()


@pytest.mark.gloo
def test_the_whole_checkpoint_is_accepted(saved: Path, tmp_path: Path) -> None:
    """So the test above refuses the damage. Nothing is written to common.pt."""
    assert not (saved / "step_3" / COMMON).exists()
    check_checkpoint(saved / "step_3", verify=True)
    folder = tmp_path / "rewritten"
    shutil.copytree(saved / "step_3", folder)
    (folder / MANIFEST).unlink()
    write_object(folder, read_object(folder))
    check_checkpoint(folder, verify=True)


@pytest.mark.gloo
def test_two_objects_that_begin_together_are_both_read(saved: Path, tmp_path: Path) -> None:
    """The shorter one ends within its archive; a check by beginnings would pass over it."""
    folder = tmp_path / "step"
    shutil.copytree(saved / "step_3", folder)
    (folder / MANIFEST).unlink()
    metadata = read_metadata(folder)
    [index] = [index for index in metadata.storage_data if index.fqn == COMMON_OBJECT]
    whole = metadata.storage_data[index]
    for key in [key for key in metadata.storage_data if key.fqn.startswith("rng/")]:
        metadata.storage_data[key] = whole
    metadata.storage_data[index] = replace(whole, length=whole.length - 10)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=f"object '{COMMON_OBJECT}"):
        check_checkpoint(folder, verify=True)
