"""After a loss, ranks that get out of their calls keep their processes, and others get new ones.

tests/scenarios/train/test_staying_ranks.py has ranks of Megatron, in collectives.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.util.placement_group import remove_placement_group

from mcore_rl.cluster import staying_ranks
from mcore_rl.cluster.answers import RankDiedError, RankError, RankFaultError
from mcore_rl.cluster.model_groups import TrainerGroup
from mcore_rl.cluster.placement import reserve
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.config import ClusterConfig
from mcore_rl.planning.bundles import plan_ranks
from tests.support.cluster_workers import BuiltWorker
from tests.support.trainer_groups import build_trainer, wait_until_gone

pytestmark = pytest.mark.e2e
STAY = "trainer: ranks [0] go on in their processes, ranks [1] get new ones"


class Group(TrainerGroup):
    worker_cls = BuiltWorker  # pyright: ignore[reportAssignmentType]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with open_ray_session(ClusterConfig(object_store_mib=80), num_cpus=2):
        yield


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    [slots] = reserve([plan_ranks(2, 0.5, gpus_per_node=0)], timeout_s=20)
    made = build_trainer(Group, slots, tmp_path, timeout_s=60)
    yield made
    made._group.kill()
    remove_placement_group(slots[0].group)


def check_built(group: Group) -> None:
    """All ranks have met once more, and answer."""
    assert group.find_loss(wait_s=5.0) is None
    told = group._group.call_all("tell", deadline_s=30)
    assert [rank for rank, _ in told] == [0, 1] and len({port for _, port in told}) == 1


def test_a_rank_that_lives_keeps_its_process(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    """A death of one is told; the other one is built anew where it is, as often as it comes."""
    for _ in range(2):
        before = group.pids()
        assert group.find_loss(wait_s=5.0) is None
        os.kill(before[1], signal.SIGKILL)
        loss = group.find_loss(wait_s=10.0)
        assert isinstance(loss, RankDiedError) and loss.ranks == (1,)
        with pytest.raises(RankError, match="after the ranks were stopped"):
            asyncio.run(group._call_async("tell"))
        assert group.find_loss(wait_s=0.0) is loss, "what comes later does not hide it"
        group.restart()
        after = group.pids()
        assert after[0] == before[0] and after[1] != before[1]
        check_built(group)
    assert caplog.messages.count(STAY) == 2


def test_a_rank_that_does_not_get_out_of_its_call_is_replaced(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staying_ranks, "LEAVE_S", 2.0)
    before = group.pids()
    with pytest.raises(RankDiedError):  # the other rank sleeps
        group._group.call_all("die", 0, "kill", deadline_s=30)
    began_s = time.monotonic()
    group.restart()
    assert 2.0 <= time.monotonic() - began_s < 30
    assert not set(before) & set(group.pids())
    assert wait_until_gone(before, 10.0) == []
    check_built(group)


def test_a_rank_that_is_ended_within_a_call_ends_at_once(group: Group) -> None:
    before = group.pids()
    threading.Timer(0.5, os.kill, (before[1], signal.SIGTERM)).start()
    began_s = time.monotonic()
    with pytest.raises(RankDiedError):
        group._group.call_all("sleep", 1, deadline_s=60)
    assert time.monotonic() - began_s < 10
    group.restart()
    assert group.pids()[0] == before[0]
    check_built(group)


def test_a_rank_with_an_error_of_its_gpu_is_replaced(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    before = group.pids()
    with pytest.raises(RankFaultError):
        group._group.call_all("break_gpu", 1, deadline_s=30)
    group.restart()
    after = group.pids()
    assert after[0] == before[0] and after[1] != before[1]
    assert STAY in caplog.messages
    check_built(group)


def test_any_other_error_ends_all_ranks(group: Group) -> None:
    before = group.pids()
    with pytest.raises(RankError, match="bad value on 1"):
        group._group.call_all("fail", 1, deadline_s=60)
    assert wait_until_gone(before, 10.0) == []
