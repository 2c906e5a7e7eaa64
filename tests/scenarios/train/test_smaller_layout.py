"""Fewer or more data-parallel ranks go on from the states that others kept, lost ones included."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from mcore_rl.planning.smaller_layout import find_namesake
from mcore_rl.process.kept_memory import KeptMemory
from mcore_rl.train.actor import Actor
from mcore_rl.types import StepStats
from tests.support.distributed import run_ranks
from tests.support.optimizer_layouts import read
from tests.support.tiny_training import (
    make_actor,
    make_batches,
    my_batches,
    token_loss,
    write_hf_model,
)

ADAM = OptimizerConfig(lr=1e-3, warmup_steps=3)
MUON = OptimizerConfig(name="muon", lr=1e-3, warmup_steps=3)
ROOM = 32 << 20
"""Bytes reserved for a copy, more than it has."""
Layout = dict[str, Any]
Case = tuple[ModelConfig, OptimizerConfig]


def step(actor: Actor) -> StepStats | None:
    """Take a step on as many micro-batches as 1, 2 and 3 data-parallel ranks can share."""
    batches = [*make_batches(), *make_batches()[:2]]
    num_tokens = sum(sum(batch.lens_N) for batch in batches)
    return actor.train_step(my_batches(batches), token_loss, temperature=1.0, num_tokens=num_tokens)


def make(rank: int, world_size: int, port: int, case: Case, layout: Layout) -> Actor:
    model, optimizer = case
    return make_actor(rank, world_size, port, model, ParallelConfig(**layout), optimizer)


def keep_two(
    rank: int,
    world_size: int,
    port: int,
    root: Path,
    held: list[list[str]],
    case: Case,
    layout: Layout,
) -> list[StepStats | None]:
    """Keep the states after two steps, and take two more, as if no rank were lost."""
    actor = make(rank, world_size, port, case, layout)
    actor.use_kept_memory(held[rank])
    stats = []
    for number in (1, 2):
        stats.append(step(actor))
        actor.keep_state(number)
    stats.append(step(actor))
    actor.export_hf(root / "whole")
    return [*stats, step(actor)]


def take_over(
    rank: int,
    world_size: int,
    port: int,
    root: Path,
    case: Case,
    layouts: tuple[Layout, Layout],
    held: list[list[str]],
    paths: list[list[str]],
) -> StepStats | None:
    """Compose the states after two steps, take the third, and save it."""
    earlier, layout = layouts
    actor = make(rank, world_size, port, case, layout)
    actor.use_kept_memory(paths[rank])
    like = str(find_namesake(ParallelConfig(**earlier), ParallelConfig(**layout), rank))
    for number in (1, 2):
        sources = {str(k): copies[number - 1] for k, copies in enumerate(held)}
        actor.compose_state(number, sources, like)
    assert actor.kept_steps == [1, 2]
    actor.restore_state(2)
    stats = step(actor)
    actor.export_hf(root / "smaller")
    actor.save(root / "checkpoint", {"step": 3})
    actor.finish_save()
    return stats


def go_on(
    rank: int, world_size: int, port: int, root: Path, case: Case, layout: Layout
) -> StepStats | None:
    """Take the fourth step from the checkpoint of the smaller layout."""
    actor = make(rank, world_size, port, case, layout)
    assert actor.load(root / "checkpoint") == {"step": 3}
    return step(actor)


def find_stats(answers: list[Any]) -> Any:
    """Return the answer of the first rank that owns an output."""
    return next(answer for answer in answers if answer is not None)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf_model(tmp_path_factory.mktemp("smaller") / "model"))


def reserve(memory: KeptMemory, name: str, layout: Layout) -> list[list[str]]:
    ranks = range(ParallelConfig(**layout).world_size)
    return [[memory.reserve(f"{name}{rank}_{k}", ROOM) for k in range(2)] for rank in ranks]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("earlier", "layout", "dtype", "optimizer"),
    [
        ({"dp": 2}, {"dp": 1}, "bfloat16", ADAM),
        pytest.param(
            {"tp": 2, "ep": 2, "dp": 2},
            {"tp": 2, "ep": 2, "dp": 1},
            "float32",
            ADAM,
            marks=pytest.mark.slow,
        ),
        pytest.param({"dp": 1}, {"dp": 2}, "bfloat16", ADAM, marks=pytest.mark.slow),
        pytest.param(
            {"tp": 2, "ep": 2, "dp": 1},
            {"tp": 2, "ep": 2, "dp": 2},
            "float32",
            ADAM,
            marks=pytest.mark.slow,
        ),
        pytest.param({"dp": 3}, {"dp": 2}, "float32", MUON, marks=pytest.mark.slow),
        pytest.param(
            {"dp": 2, "pp": 2}, {"dp": 1, "pp": 2}, "float32", ADAM, marks=pytest.mark.slow
        ),
    ],
    ids=[
        "dp2-1",
        "tp2-ep2-dp2-1",
        "dp1-2",
        "tp2-ep2-dp1-2",
        "dp3-2-muon",
        "pp2-dp2-1",
    ],
)
def test_another_layout_does_the_step_again(
    model_dir: str,
    tmp_path: Path,
    earlier: Layout,
    layout: Layout,
    dtype: Any,
    optimizer: OptimizerConfig,
) -> None:
    case = ModelConfig(path=model_dir, dtype=dtype), optimizer
    before, after = (ParallelConfig(**sizes).world_size for sizes in (earlier, layout))
    memory = KeptMemory()
    held, paths = reserve(memory, "before", earlier), reserve(memory, "after", layout)
    kept = run_ranks(keep_two, before, tmp_path, held, case, earlier)
    third, fourth = find_stats([stats[2:] for stats in kept if stats[2] is not None])
    again = run_ranks(take_over, after, tmp_path, case, (earlier, layout), held, paths)
    memory.close()
    got = find_stats(again)
    assert got.loss == pytest.approx(third.loss, rel=1e-6)
    assert got.grad_norm == pytest.approx(third.grad_norm, rel=1e-6)
    wanted, found = read(tmp_path / "whole"), read(tmp_path / "smaller")
    assert wanted.keys() == found.keys()
    ulp = 2**-8 if dtype == "bfloat16" else 0.0
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=ulp, atol=1e-6, msg=name)
    resumed = find_stats(run_ranks(go_on, before, tmp_path, case, earlier))
    assert resumed.loss == pytest.approx(fourth.loss, rel=1e-6)
