"""A rank that stops is named on the controller's terminal, once."""

import asyncio
from pathlib import Path

import pytest

from mcore_rl.cluster.breakpoints import INTERVAL_S, name_breakpoints
from mcore_rl.cluster.group import RankGroup
from mcore_rl.cluster.placement import reserve
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.config import ClusterConfig
from mcore_rl.planning.bundles import plan_ranks
from tests.support.cluster_workers import Worker
from tests.support.debuggers import ray_debug

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_stopped_rank_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def attach_after_a_while() -> str:
        told = ""
        while "waits for" not in told:
            await asyncio.sleep(0.1)
            told += capsys.readouterr().err
        await asyncio.sleep(2.5 * INTERVAL_S)
        told += capsys.readouterr().err
        await asyncio.to_thread(ray_debug, told, "continue")
        return told

    async def both() -> tuple[list[int], str]:
        call = asyncio.ensure_future(group.call_all_async("pause", deadline_s=50))
        told = await asyncio.wait_for(attach_after_a_while(), timeout=50)
        return await call, told

    with open_ray_session(ClusterConfig(object_store_mib=80)):
        [slots] = reserve([plan_ranks(1, 0.5, gpus_per_node=0)], timeout_s=20)
        group = RankGroup("trainer", slots, tmp_path)
        group.build(Worker, [(0,)], deadline_s=60)
        with name_breakpoints():
            answers, told = asyncio.run(both())
    assert answers == [41]
    assert told.count("mcore-rl: breakpoint() in ray::trainer_rank0.call at ") == 1, told
