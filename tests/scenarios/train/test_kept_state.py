"""Ranks that were replaced go on from kept memory, bit for bit as if they had lived."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config import (
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from mcore_rl.planning.kept_state import predict_kept_states
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.process.kept_copies import Span, encode_index
from mcore_rl.process.kept_memory import HEADER_BYTES, KeptMemory
from mcore_rl.train.actor import Actor
from mcore_rl.train.recovery.rank_state import (
    SMALL_BYTES,
    Generation,
    StateLostError,
)
from mcore_rl.types import StepStats
from tests.support.distributed import run_each, run_ranks
from tests.support.optimizer_layouts import name_of, read, step
from tests.support.tiny_training import make_actor, write_hf_model

LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2},
    {"tp": 2, "ep": 2},
    {"pp": 2, "vpp": 2},
]
ADAM = OptimizerConfig(lr=1e-3, warmup_steps=3)
MUON = OptimizerConfig(name="muon", lr=1e-3, warmup_steps=3)
Spec = tuple[ModelConfig, OptimizerConfig, dict[str, Any]]


def make(rank: int, world_size: int, port: int, spec: Spec) -> Actor:
    model, optimizer, layout = spec
    return make_actor(rank, world_size, port, model, ParallelConfig(**layout), optimizer)


def go_on(rank: int, world_size: int, port: int, root: Path, spec: Spec) -> Any:
    """Take three steps without an interruption."""
    actor = make(rank, world_size, port, spec)
    stats = [step(actor) for _ in range(3)]
    actor.export_hf(root / name_of(spec[2]))
    return stats, torch.rand(3).tolist(), actor.kept_state_bytes


def be_lost(
    rank: int, world_size: int, port: int, paths: list[list[str]], spec: Spec
) -> tuple[StepStats | None, list[int]]:
    """Keep the states after two steps, and die within the copy of the third."""
    actor = make(rank, world_size, port, spec)
    actor.use_kept_memory(paths[rank])
    assert actor.kept_steps == []
    actor.keep_state(0)
    step(actor)
    actor.hold(())  # as beside engines that share the GPU
    actor.keep_state(1)
    actor.hold(("weights", "training"))
    stats = step(actor)
    actor.keep_state(2)
    step(actor)
    oldest = min(actor._state._generations, key=lambda copy: copy.step or 0)
    oldest.clear()
    return stats, actor._state.kept_steps


def take_over(
    rank: int, world_size: int, port: int, root: Path, paths: list[list[str]], spec: Spec
) -> Any:
    """Go back to the second step, one step too far before, and take the third."""
    actor = make(rank, world_size, port, spec)
    actor.use_kept_memory(paths[rank])
    assert actor.kept_steps == [2]
    step(actor)
    actor.restore_state(2)
    stats = step(actor)
    actor.export_hf(root / f"{name_of(spec[2])}_again")
    return stats, torch.rand(3).tolist()


def predict_bytes(model: ModelConfig, optimizer: OptimizerConfig, layout: dict[str, Any]) -> float:
    """Return the bytes of a copy that the plan expects."""
    config = Config(
        model=model, parallel=ParallelConfig(**layout), train=TrainConfig(optimizer=optimizer)
    )
    [kept] = predict_kept_states(PlannedRun.make(config), config.run.recovery)
    return kept.rank_bytes


def reserve(memory: KeptMemory, num_bytes: list[int]) -> list[list[str]]:
    return [
        [memory.reserve(f"rank{rank}_{k}", num) for k in range(2)]
        for rank, num in enumerate(num_bytes)
    ]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf_model(tmp_path_factory.mktemp("kept") / "model"))


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("dtype", "optimizer", "layouts"),
    [
        pytest.param("bfloat16", ADAM, LAYOUTS[:1], id="adam"),
        pytest.param("bfloat16", ADAM, LAYOUTS[1:], id="layouts", marks=pytest.mark.slow),
        pytest.param("float32", MUON, LAYOUTS, id="muon", marks=pytest.mark.slow),
    ],
)
def test_new_ranks_go_on_bit_for_bit(
    model_dir: str,
    tmp_path: Path,
    dtype: Any,
    optimizer: OptimizerConfig,
    layouts: list[dict[str, Any]],
) -> None:
    model = ModelConfig(path=model_dir, dtype=dtype)
    specs = [(model, optimizer, layout) for layout in layouts]
    whole = run_each(go_on, 2, specs, tmp_path)
    for (_, _, layout), ranks in zip(specs, whole, strict=True):
        planned = predict_bytes(model, optimizer, layout)
        largest = max(num_bytes for _, _, num_bytes in ranks) - HEADER_BYTES - SMALL_BYTES
        assert largest == pytest.approx(planned, rel=0.02), layout
    for spec, ranks in zip(specs, whole, strict=True):
        memory = KeptMemory()
        paths = reserve(memory, [num_bytes for _, _, num_bytes in ranks])
        lost = run_ranks(be_lost, 2, paths, spec)
        again = run_ranks(take_over, 2, tmp_path, paths, spec)
        memory.close()
        for (stats, drawn, _), (second, kept), (third, redrawn) in zip(
            ranks, lost, again, strict=True
        ):
            assert kept == [2]
            assert (second, third) == (stats[1], stats[2])
            assert redrawn == drawn
        wanted, got = (
            read(tmp_path / name_of(spec[2])),
            read(tmp_path / f"{name_of(spec[2])}_again"),
        )
        assert wanted.keys() == got.keys()
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_a_copy_is_whole_or_not_there() -> None:
    memory = KeptMemory()
    values = [torch.arange(5, dtype=torch.uint8), torch.full((70,), 7, dtype=torch.uint8)]
    copy = Generation(memory.reserve("rank0_0", 1 << 21))
    assert copy.step is None
    with pytest.raises(StateLostError, match="the state of step 3 is not in memory"):
        copy.read(3, values)
    spans = [Span("weights", 0, 5, 64)]
    copy.write(3, b"small", values, encode_index(spans))
    assert copy.read_index() == spans
    found = [torch.zeros_like(value) for value in values]
    assert copy.read(3, found) == b"small"
    assert all(map(torch.equal, found, values))
    with pytest.raises(StateLostError, match="is one of other tensors"):
        copy.read(3, found[::-1])
    copy.mapped[-4096 : -4096 + 1] = b"x"  # beyond the copy
    assert copy.read(3, found) == b"small"
    at = bytes(copy.mapped[:]).index(bytes(70 * [7]))
    copy.mapped[at + 9 : at + 10] = b"\0"
    with pytest.raises(StateLostError, match="is damaged"):
        copy.read(3, found)
    with pytest.raises(ValueError, match="there is room for"):
        copy.write(4, b"", [torch.zeros(1 << 21, dtype=torch.uint8)], b"")
    assert copy.step is None


def test_memory_that_is_gone_is_named() -> None:
    memory = KeptMemory()
    path = memory.reserve("rank0_0", 4096)
    memory.close()
    with pytest.raises(ValueError, match=f"{path}: .* cannot be opened"):
        Generation(path)
