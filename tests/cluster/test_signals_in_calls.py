"""A stop that is overdue while ranks are waited for leaves them as they are; no Ray is needed."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cluster.answers import Answers, Rank
from mcore_rl.cluster.group import RankGroup
from mcore_rl.cluster.staying_ranks import StayingRanks
from mcore_rl.process.signals import (
    SIGNAL,
    OverdueStopError,
    allow_interruption,
    handle_stops,
    watch_for_stop_requests,
)


@pytest.fixture(autouse=True)
def watch() -> Iterator[None]:
    before = signal.getsignal(SIGNAL)
    watch_for_stop_requests()
    yield
    watch_for_stop_requests()
    signal.signal(SIGNAL, before)


class PendingRef:
    """A reference to the answer of a call that does not end."""

    def future(self) -> Future[Any]:
        return Future()


@pytest.mark.parametrize("kind", [RankGroup, StayingRanks])
def test_an_overdue_stop_does_not_end_the_ranks_it_waits_for(
    tmp_path: Path, kind: type[RankGroup]
) -> None:
    group = kind("trainer", [], tmp_path)
    pending: Any = PendingRef()
    answers = Answers("rest", [pending], [Rank("trainer", 0, tmp_path / "log")], 20.0)
    with handle_stops(0.2), pytest.raises(OverdueStopError), allow_interruption():
        os.kill(os.getpid(), SIGNAL)
        group.finish(answers)
    assert group.call_all("save", deadline_s=1.0) == [], "the ranks can still save"
