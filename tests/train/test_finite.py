"""Numbers of a forward pass that are not finite are refused, with their place.

A step whose loss or gradient is not finite on any rank changes nothing on any.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.config import LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from mcore_rl.train.actor import Actor
from mcore_rl.train.critic import CriticModel
from mcore_rl.train.offload import list_optimizer_tensors
from mcore_rl.train.runtime import init_distributed
from mcore_rl.train.stats import NotFiniteError, check_finite
from mcore_rl.train.trained_model import TrainedModel
from mcore_rl.types import StepStats, TrainBatch
from tests.support.distributed import run_ranks
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    make_batches,
    my_batches,
    token_loss,
    write_hf_model,
)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_by_place(bad: float) -> None:
    good_T = torch.tensor([-1.0, 0.0, -30.0])
    check_finite("values", [good_T, good_T])
    bad_T = torch.tensor([-1.0, bad, bad])
    message = rf"2 of 3 values of micro-batch 1 are not finite, the first at token 1 \({bad}\)"
    with pytest.raises(NotFiniteError, match=message):
        check_finite("values", [good_T, bad_T])


Layout = dict[str, Any]
FAULTS = ("gradient", "infinite gradient", "loss alone")


def plant(fault: str, loss_T: Tensor) -> Tensor:
    """Return the loss of a micro-batch with a fault."""
    if fault == "loss alone":
        return loss_T + torch.full_like(loss_T, math.nan)
    return loss_T * (math.nan if fault == "gradient" else 1e38) * 10


def list_state(model: TrainedModel) -> list[Tensor]:
    """Return copies of weights, main weights, moments and the optimizer's own steps."""
    tensors = [*model.weight_layout()[1].values(), *list_optimizer_tensors(model.optimizer)]
    steps = [torch.tensor(group["step"]) for group in model.optimizer.param_groups]
    return [tensor.clone() for tensor in (*tensors, *steps)]


def check_steps(model: TrainedModel, step: Callable[[str], StepStats | None]) -> list[StepStats]:
    """Take a step without a fault, one with each, and one more; return what their owner reports."""
    stats = [step("")]
    for fault in FAULTS:
        before = list_state(model)
        stats.append(step(fault))
        assert all(map(torch.equal, before, list_state(model))), fault
    before = list_state(model)
    stats.append(step(""))
    after = list_state(model)
    assert not all(map(torch.equal, before, after)) and all(t.isfinite().all() for t in after)
    return [told for told in stats if told is not None]


def skip(
    rank: int, world_size: int, port: int, hf_dir: Path, layouts: list[Layout]
) -> list[list[StepStats]]:
    """Plant faults in the first micro-batch of the last rank alone; return stats by layout."""
    model = ModelConfig(path=str(hf_dir))
    reports = []
    for layout in layouts:
        lora = LoraConfig(rank=layout.pop("lora", 0))
        actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout), lora=lora)
        batches = my_batches()

        def step(fault: str, actor: Actor = actor, batches: list[TrainBatch] = batches) -> Any:
            is_here = fault and dist.get_rank() == world_size - 1
            todo = [fault if is_here else ""]

            def loss(*args: Any) -> Any:
                loss_T, metrics = token_loss(*args)
                planted, todo[0] = todo[0], ""
                return plant(planted, loss_T) if planted else loss_T, metrics

            return actor.train_step(batches, loss, temperature=1.0, num_tokens=NUM_TOKENS)

        reports.append(check_steps(actor, step))
    return reports


@pytest.mark.gloo
@pytest.mark.parametrize(
    "layouts",
    [
        [{"ep": 2}, {"pp": 2}],
        pytest.param([{"tp": 2}, {"cp": 2}, {"dp": 2, "lora": 4}], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_fault_of_one_rank_leaves_the_state_of_all_as_it_was(
    tmp_path: Path, layouts: list[Layout]
) -> None:
    told = run_ranks(skip, 2, write_hf_model(tmp_path), layouts)
    for layout, by_rank in zip(layouts, zip(*told, strict=True), strict=True):
        for stats in filter(None, by_rank):
            shares = [step.metrics["train/skipped_share"] for step in stats]
            assert shares == [0.0, 1.0, 1.0, 1.0, 0.0], layout
            are_finite = [math.isfinite(step.loss + step.grad_norm) for step in stats]
            assert are_finite == [True, False, False, False, True], layout
            assert math.isfinite(stats[3].grad_norm), "of the loss alone"


def skip_of_critic(rank: int, world_size: int, port: int, hf_dir: Path) -> list[StepStats]:
    init_distributed(rank, world_size, "127.0.0.1", port, ParallelConfig(), seed=0, timeout_s=60)
    model, train = ModelConfig(path=str(hf_dir)), TrainConfig()
    critic = CriticModel(model, ParallelConfig(), train, OptimizerConfig(lr=1e-3), 6, seed=0)
    batches = [replace(batch, returns_T=batch.advantages_T) for batch in make_batches()]

    def step(fault: str) -> StepStats | None:
        def loss(values_T: Tensor, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
            error_T = (values_T - cast(Tensor, batch.returns_T)) ** 2
            return plant(fault, error_T) if fault else error_T, {}

        return critic.train_step(batches, loss, num_tokens=NUM_TOKENS)

    return check_steps(critic, step)


def test_a_critic_skips_faults_too(tmp_path: Path) -> None:
    [stats] = run_ranks(skip_of_critic, 1, write_hf_model(tmp_path))
    assert [step.metrics["train/skipped_share"] for step in stats] == [0.0, 1.0, 1.0, 1.0, 0.0]
