"""Ranks of which one dies: the others answer on, and the dead one is named."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from mcore_rl.cluster.answers import RankDiedError, RankError
from mcore_rl.cluster.independent_ranks import IndependentRanks
from mcore_rl.cluster.placement import reserve
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.config import ClusterConfig
from mcore_rl.planning.bundles import plan_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


class Adder:
    def __init__(self, first: int) -> None:
        self.first = first

    def add(self, second: int) -> int:
        if second < 0:
            raise ValueError(f"second={second} is negative")
        return self.first + second

    def close(self) -> None: ...


def died_during(
    group: IndependentRanks, ranks: list[int], second: int, pids: list[int]
) -> dict[int, Any]:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return asyncio.run(group.gather_living(ranks, "add", second, deadline_s=60.0))


def test_the_others_answer_when_one_died_and_it_can_be_built_anew(tmp_path: Path) -> None:
    with open_ray_session(ClusterConfig(object_store_mib=80), num_cpus=2):
        [slots] = reserve([plan_ranks(3, 0.1, gpus_per_node=0)], timeout_s=20)
        group = IndependentRanks("adder", slots, tmp_path, returns=True)
        group.build(Adder, [(10,), (20,), (30,)], 60.0)
        assert died_during(group, [0, 1, 2], 1, []) == {0: 11, 1: 21, 2: 31}
        answers = died_during(group, [0, 1, 2], 1, [group.pids()[1]])
        assert (answers[0], answers[2]) == (11, 31)
        assert isinstance(answers[1], RankDiedError) and answers[1].ranks == (1,)
        assert str(answers[1]).startswith("adder rank 1 died")
        group.call_living([0, 1, 2], "close", deadline_s=60.0)
        asyncio.run(group.wait_for_process(1, 60.0))
        asyncio.run(group.build_one(1, Adder, (40,), 60.0))
        assert died_during(group, [1], 2, []) == {1: 42}
        with pytest.raises(RankError, match="ValueError: second=-1 is negative"):
            died_during(group, [0, 2], -1, [])
        assert died_during(group, [0, 2], 1, []) == {0: 11, 2: 31}, "an error kills nobody"
        killed = psutil.Process(group.pids()[2])
        group.kill_ranks([2])
        psutil.wait_procs([killed], timeout=20)  # Ray kills a moment later
        assert isinstance(died_during(group, [2], 1, [])[2], RankDiedError)
