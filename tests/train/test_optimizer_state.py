"""A rank writes the optimizer's state of what it updates, and none of it lands in another place."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from mcore_rl.train.optimizer import split
from tests.support.distributed import run_ranks
from tests.support.saved import saved_tensors
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    my_batches,
    token_loss,
    write_hf_model,
)

LAYOUTS: list[dict[str, int]] = [{"pp": 2, "dp": 3}, {"tp": 2, "dp": 3, "ep": 2}]
"""Tied embeddings of two stages have their own bucket; the one before is padded for 3 ranks."""
ADAM = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=0.5)


@given(start=st.integers(0, 500), size=st.integers(1, 500), shard_size=st.integers(1, 200))
def test_every_element_is_updated_by_the_rank_whose_shard_it_lies_in(
    start: int, size: int, shard_size: int
) -> None:
    parts = split(start, start + size, shard_size)
    ranks = [part.rank for part in parts for _ in range(part.start, part.end)]
    assert ranks == [(start + element) // shard_size for element in range(size)]
    assert all(part.start < part.end for part in parts)


def learn_and_save(
    rank: int, world_size: int, port: int, path: str, root: Path, layout: Any
) -> None:
    """Take two steps and save; load that in a new actor and save it again."""
    for resumes in (False, True):
        actor = make_actor(
            rank, world_size, port, ModelConfig(path=path), ParallelConfig(**layout), ADAM
        )
        folder = root / name_of(layout)
        if resumes:
            actor.load(folder)
            folder = folder.with_suffix(".again")
        else:
            for _ in range(2):
                actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
        actor.save(folder, {})
        actor.finish_save()


def name_of(layout: dict[str, int]) -> str:
    return "_".join(f"{name}{size}" for name, size in layout.items()) or "one"


def states_of(folder: Path) -> dict[str, Tensor]:
    return saved_tensors(folder, r"optimizer\.state\.")


def bytes_of_ranks(folder: Path) -> Counter[str]:
    """Return the bytes of optimizer state that each rank wrote, by the rank in the file's name."""
    written: Counter[str] = Counter()
    for index, stored in FileSystemReader(folder).read_metadata().storage_data.items():
        if index.fqn.startswith("optimizer.state."):
            written[stored.relative_path.split("_")[2]] += stored.length
    return written


@pytest.mark.gloo
@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], pytest.param(LAYOUTS[1], marks=pytest.mark.slow)], ids=name_of
)
def test_states_are_those_of_one_process_and_each_rank_writes_its_share(
    tmp_path: Path, layout: dict[str, int]
) -> None:
    path = str(write_hf_model(tmp_path / "model", tie_word_embeddings=True))
    run_ranks(learn_and_save, 1, path, tmp_path, {})
    run_ranks(learn_and_save, 6, path, tmp_path, layout)
    wanted, states = states_of(tmp_path / "one"), states_of(tmp_path / name_of(layout))
    assert {key.split(".")[2] for key in wanted} == {"param", "exp_avg", "exp_avg_sq"}
    assert states.keys() == wanted.keys()
    for key, state in states.items():
        worst, largest = (state - wanted[key]).abs().max(), wanted[key].abs().max()
        assert worst <= 1e-4 * largest, key
    again = states_of(tmp_path / f"{name_of(layout)}.again")
    assert all(torch.equal(again[key], state) for key, state in states.items())
    written = bytes_of_ranks(tmp_path / name_of(layout))
    assert len(written) == 6 and max(written.values()) < 0.25 * written.total(), written
