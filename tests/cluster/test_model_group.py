"""The spec that travels to the ranks of a model, and the order of a group's calls.

tests/scenarios/test_ranks_and_engines.py builds and trains a group, on Ray and with Megatron.
"""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.algo.policy_loss import make_policy_loss, make_value_loss, sft_loss
from mcore_rl.cluster.model_groups import CriticGroup, TrainerGroup
from mcore_rl.config import (
    AlgorithmConfig,
    CriticConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from mcore_rl.workers.model_worker import CriticWorker, ModelSpec, TrainerWorker


@pytest.mark.parametrize(
    "loss",
    [make_policy_loss(AlgorithmConfig()), make_value_loss(CriticConfig(value_clip=0.3)), sft_loss],
    ids=["policy", "value", "sft"],
)
def test_a_spec_arrives_as_it_was_sent(loss: Any) -> None:
    spec = ModelSpec(
        model=ModelConfig(path="/m"),
        parallel=ParallelConfig(ep=2),
        train=TrainConfig(epochs=2),
        optimizer=OptimizerConfig(lr=1e-3),
        total_steps=7,
        seed=3,
        loss=loss,
        collective_timeout_s=60.0,
    )
    arrived = pickle.loads(pickle.dumps(spec))
    for name, sent in vars(spec).items():
        if name != "loss":
            assert getattr(arrived, name) == sent
    assert call_of(arrived.loss) == call_of(loss)


def call_of(loss: Any) -> tuple[Any, ...]:
    """Return a loss as (function, its bound options)."""
    return (loss.func, loss.args, loss.keywords) if isinstance(loss, partial) else (loss,)


@pytest.mark.parametrize(
    ("group_cls", "role", "worker_cls"),
    [(TrainerGroup, "trainer", TrainerWorker), (CriticGroup, "critic", CriticWorker)],
)
def test_a_group_is_waited_for_only_after_its_start(
    group_cls: Any, role: str, worker_cls: type, tmp_path: Path
) -> None:
    group = group_cls((), tmp_path, call_timeout_s=1.0)
    assert (group.role, group.worker_cls, group.world_size) == (role, worker_cls, 0)
    with pytest.raises(AssertionError, match="start_build comes first"):
        group.wait_built()
