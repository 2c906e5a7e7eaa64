"""Ranks of Megatron under Ray: one is killed and one stopped, others go on in their processes."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray.util.placement_group import remove_placement_group

from mcore_rl.cluster.answers import RankError, RankLostError
from mcore_rl.cluster.model_groups import TrainerGroup
from mcore_rl.cluster.placement import reserve
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.cluster.state_keepers import StateKeepers
from mcore_rl.config import (
    ClusterConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from mcore_rl.planning.bundles import plan_ranks
from mcore_rl.types import LogprobOptions, TrainBatch
from mcore_rl.workers.model_worker import ModelSpec
from tests.support.tiny_training import NUM_TOKENS, make_batches, token_loss, write_hf_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NUM_RANKS = 4
CALL_S = 60.0
LAYOUTS: list[dict[str, Any]] = [{"tp": 2, "ep": 2, "dp": 2}, {"pp": 2, "ep": 2, "dp": 2}]
Numbers = tuple[float, float | None, list[list[float]]]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with open_ray_session(ClusterConfig(object_store_mib=80), num_cpus=2):
        yield


@contextmanager
def run_trainer(folder: Path, layout: dict[str, Any]) -> Iterator[TrainerGroup]:
    """Yield a trainer of four ranks, which keep states."""
    [slots] = reserve([plan_ranks(NUM_RANKS, 0.4, gpus_per_node=0)], timeout_s=20)
    group = TrainerGroup(slots, folder / "logs", call_timeout_s=CALL_S)
    spec = ModelSpec(
        model=ModelConfig(path=str(write_hf_model(folder / "hf"))),
        parallel=ParallelConfig(**layout),
        train=TrainConfig(),
        optimizer=OptimizerConfig(lr=1e-3),
        total_steps=6,
        seed=0,
        loss=token_loss,
        collective_timeout_s=CALL_S,
    )
    group.start_build(spec, timeout_s=240)
    group.wait_built()
    with closing(StateKeepers(group.list_nodes(), CALL_S)) as keepers:
        group.keep_in(keepers)
        yield group
    group._group.kill()
    remove_placement_group(slots[0].group)


def share_out(group: TrainerGroup) -> Sequence[list[TrainBatch]]:
    batches = make_batches()
    return [batches[dp :: group.dp_size] for dp in range(group.dp_size)]


def take_step(group: TrainerGroup) -> Numbers:
    """Return loss and gradient norm of a step, and log-probs of the weights after it."""
    per_dp = share_out(group)
    stats = group.train_step(per_dp, temperature=1.0, num_tokens=NUM_TOKENS)
    scores = group.compute_logprobs(per_dp, LogprobOptions(temperature=1.0))
    logprobs = [each.logprobs_T.tolist() for of_dp in scores for each in of_dp]
    return stats.loss, stats.grad_norm, logprobs


def lose(group: TrainerGroup, *, killed: int, stopped: int | None = None) -> None:
    """Have a rank die within a step, in which others wait for one that is stopped before."""
    pids = group.pids()
    waited_for = killed if stopped is None else stopped
    os.kill(pids[waited_for], signal.SIGSTOP)
    dying = threading.Timer(1.0, os.kill, (pids[killed], signal.SIGKILL))
    dying.start()
    with pytest.raises(RankError):
        take_step(group)
    dying.join()
    assert isinstance(group.find_loss(5.0), RankLostError)
    group.restart()
    group.restore_state(1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_get_out_of_a_collective_go_on_bit_for_bit(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    with run_trainer(tmp_path, layout) as group:
        take_step(group)
        group.keep_state(1)
        wanted = [take_step(group) for _ in range(2)]
        first = group.pids()
        lose(group, killed=3, stopped=2)
        second = group.pids()
        assert second[:2] == first[:2] and not set(second[2:]) & set(first)
        assert [take_step(group) for _ in range(2)] == wanted
        lose(group, killed=0)
        third = group.pids()
        assert third[1:] == second[1:] and third[0] != second[0]
        assert [take_step(group) for _ in range(2)] == wanted
