"""Shared by both kinds of sync: trainer ranks that die fail the sync of every engine, by name."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from mcore_rl.weight_sync.controller.strategy import wait_sent
from mcore_rl.weight_sync.controller.sync import SyncController, SyncError
from mcore_rl.weight_sync.wire import Report
from tests.support.thread_engines import ThreadTrainers, open_thread_stage


class DyingTrainers(ThreadTrainers):
    """Trainer ranks that die when they are told to send."""

    async def send(
        self, version: int, engines: Sequence[str], timeout_s: float
    ) -> Sequence[Mapping[str, Report]]:
        for engine in engines:
            self.disconnect(engine)
        raise RuntimeError("trainer rank 1 died")


@pytest.mark.parametrize("staged", [True, False])
def test_trainer_ranks_that_die_fail_the_sync_of_every_engine(staged: bool) -> None:
    with open_thread_stage(1, 2) as stage:
        trainers = DyingTrainers(2, stage.faults)
        controller = SyncController(trainers, timeout_s=60.0, staged=staged)
        asyncio.run(controller.connect(stage.urls))
        with pytest.raises(
            SyncError,
            match=r"no engine took version 1: (the trainer ranks failed: trainer rank 1 died.*){2}",
        ):
            asyncio.run(controller.sync(1))
        assert controller.linked == () == controller.in_rotation
        assert [engine.version for engine in stage.engines] == ["default", "default"]
        assert [engine.is_paused for engine in stage.engines] == [not staged] * 2


def test_the_outcome_of_a_send_is_its_answer_or_its_error() -> None:
    async def outcomes() -> list[object]:
        async def fail() -> None:
            raise RuntimeError("gone")

        async def answer() -> list[dict[str, Report]]:
            return [{}]

        sending = [asyncio.ensure_future(act()) for act in (answer, fail)]
        return [await wait_sent(each) for each in sending]

    answer, error = asyncio.run(outcomes())
    assert answer == [{}]
    assert isinstance(error, RuntimeError)
