"""A model whose experts are grouped products trains as any other, and reads no counts back."""

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode

from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from mcore_rl.train.actor import Actor
from mcore_rl.train.grouped_experts import GroupedExperts
from mcore_rl.train.transformer_config import make_transformer_config
from mcore_rl.types import StepStats
from mcore_rl.weights.hf.config import read_hf_config
from tests.support.distributed import run_ranks
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    my_batches,
    token_loss,
    write_hf_model,
)

OPTIMIZER = OptimizerConfig(lr=1e-2, clip_grad=1.0, eps=1e-4)
"""With a smaller eps, Adam would make a whole step of the rounding of a gradient near 0."""
GROUPED = {"expert_gemm": "grouped_mm"}
READERS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__", "nonzero"}
EXPERTS = ("/moe/experts.py", "/moe/token_dispatcher.py", "/train/grouped_experts.py")


def step(actor: Actor) -> StepStats | None:
    return actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)


class Reads(TorchFunctionMode):
    """Counts what would make the host wait for the device, in the code of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READERS:
            frame = traceback.extract_stack(limit=2)[0]
            if any(part in frame.filename for part in EXPERTS):
                self.lines[f"{Path(frame.filename).name}:{frame.lineno} {name}"] += 1
        return func(*args, **kwargs or {})


def take_steps(
    rank: int, world_size: int, port: int, hf_dir: Path, layout: Any, train: Any
) -> tuple[list[StepStats | None], dict[str, torch.Tensor]]:
    """Take two steps and return their statistics, and this rank's tensors by name."""
    model = ModelConfig(path=str(hf_dir))
    actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout), OPTIMIZER, **train)
    stats = [step(actor), step(actor)]
    chunk = actor.chunks[0]
    return stats, {name: p.detach().clone() for name, p in chunk.named_parameters()}


def count_reads(rank: int, world_size: int, port: int, hf_dir: Path, train: Any) -> Any:
    """Return (reads by line, whether sizes went to the host) of a step with experts apart."""
    model, layout = ModelConfig(path=str(hf_dir)), ParallelConfig(ep=world_size)
    unclipped = OptimizerConfig(clip_grad=0.0)
    actor = make_actor(rank, world_size, port, model, layout, unclipped, **train)
    moved: list[str] = []
    reads = Reads()
    with pytest.MonkeyPatch.context() as patch, reads:
        move = token_dispatcher.maybe_move_tensor_to_cpu

        def note(*args: Any, **kwargs: Any) -> Any:
            moved.append("moved")
            return move(*args, **kwargs)

        patch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", note)
        step(actor)
    kinds = {type(module).__name__ for module in actor.chunks[0].modules()}
    assert (GroupedExperts.__name__ in kinds) is bool(train)
    return reads.lines, bool(moved)


def save(rank: int, world_size: int, port: int, hf_dir: Path, train: Any, folder: Path) -> Any:
    model = ModelConfig(path=str(hf_dir))
    actor = make_actor(rank, world_size, port, model, ParallelConfig(ep=2), OPTIMIZER, **train)
    step(actor)
    actor.save(folder, {})
    actor.finish_save()
    return step(actor)


def resume(rank: int, world_size: int, port: int, hf_dir: Path, train: Any, folder: Path) -> Any:
    model = ModelConfig(path=str(hf_dir))
    actor = make_actor(rank, world_size, port, model, ParallelConfig(), OPTIMIZER, **train)
    actor.load(folder)
    return step(actor)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("layout", "train"),
    [
        pytest.param({}, {}, id="one rank"),
        pytest.param({"ep": 2}, {}, id="ep"),
        pytest.param(
            {"tp": 2, "etp": 2},
            {"recompute": "moe_act"},
            id="etp, activations recomputed",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_weights_after_steps_are_those_of_separate_products(
    tmp_path: Path, layout: Any, train: Any
) -> None:
    write_hf_model(tmp_path)
    world_size = 2 if layout else 1
    plain = run_ranks(take_steps, world_size, tmp_path, layout, train)
    grouped = run_ranks(take_steps, world_size, tmp_path, layout, train | GROUPED)
    for (stats, tensors), (wanted, wanted_tensors) in zip(grouped, plain, strict=True):
        assert tensors.keys() == wanted_tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, wanted_tensors[name], atol=1e-5, rtol=1e-4)
        for got, want in zip(stats, wanted, strict=True):
            assert (got is None) is (want is None)
            if got is not None and want is not None:
                assert got.loss == pytest.approx(want.loss, rel=1e-4)
                assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-4)


def test_a_rank_with_all_experts_reads_nothing_back(tmp_path: Path) -> None:
    write_hf_model(tmp_path)
    [[lines, moved]] = run_ranks(count_reads, 1, tmp_path, {})
    assert moved and any(line.endswith("tolist") for line in lines)
    [[lines, moved]] = run_ranks(count_reads, 1, tmp_path, GROUPED)
    assert not moved and not lines


@pytest.mark.gloo
def test_ranks_that_exchange_tokens_read_sizes_of_messages_alone(tmp_path: Path) -> None:
    write_hf_model(tmp_path)
    for lines, moved in run_ranks(count_reads, 2, tmp_path, GROUPED):
        assert moved and not any(line.startswith("experts.py") for line in lines)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("first", "second"), [({}, GROUPED), pytest.param(GROUPED, {}, marks=pytest.mark.slow)]
)
def test_a_checkpoint_continues_with_the_other_kind(
    tmp_path: Path, first: Any, second: Any
) -> None:
    write_hf_model(tmp_path / "hf")
    straight = run_ranks(save, 2, tmp_path / "hf", first, tmp_path / "step_1")
    [resumed] = run_ranks(resume, 1, tmp_path / "hf", second, tmp_path / "step_1")
    wanted = next(stats for stats in straight if stats is not None)
    assert resumed.loss == pytest.approx(wanted.loss, abs=1e-5)
    assert resumed.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)


@pytest.mark.parametrize(
    ("sizes", "train", "error"),
    [
        ({"moe_intermediate_size": 36}, {}, r"experts of 64 x 36 .* multiples of 8"),
        ({}, {"megatron": {"fp8": "hybrid"}}, "fp8=hybrid"),
    ],
)
def test_experts_that_it_cannot_compute_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: Any, train: Any, error: str
) -> None:
    monkeypatch.setattr("mcore_rl.train.transformer_config.refuse_unavailable", lambda *_: None)
    write_hf_model(tmp_path, **sizes)
    config = TrainConfig(**GROUPED, **train)
    with pytest.raises(ValueError, match=error):
        make_transformer_config(read_hf_config(tmp_path), ParallelConfig(), torch.bfloat16, config)
