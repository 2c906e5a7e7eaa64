"""A linked engine: no wait is longer than reports can take to come, and relay links are kept."""

import asyncio
import time
from dataclasses import replace
from threading import Timer

import pytest

from mcore_rl.weight_sync.controller import linked_engine
from mcore_rl.weight_sync.controller.linked_engine import LinkedEngine
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.wire import Report, StageRequest
from tests.support.link_ends import make_link

FIRST = Report("rank 0 of engine engine-0")
SECOND = Report("rank 1 of engine engine-0")


def make_engine() -> LinkedEngine:
    """An engine of ranks 2 and 3 of its link, both silent."""
    store, link = make_link(num_senders=2, num_receivers=2, timeout_s=5.0)
    return LinkedEngine(link, store, tp_size=2)


def never() -> bool:
    return False


def test_a_rank_without_a_report_counts_as_failed() -> None:
    engine = make_engine()
    engine.store.put_report("swap", 3, SECOND)
    first, second = engine.take_reports("swap")
    assert first.missing and first.peer_lost and first.rank == FIRST.rank
    assert first.error == "did not report (see the engine's log)"
    assert second == SECOND
    assert [report.missing for report in engine.take_reports("swap")] == [True, True]


def test_reports_are_waited_for_until_all_are_there() -> None:
    engine = make_engine()
    engine.store.put_report("connect", 2, FIRST)
    late = Timer(0.05, LinkStore.open(engine.link).put_report, ("connect", 3, SECOND))
    late.start()
    reports = asyncio.run(engine.wait_reports("connect", time.monotonic() + 5))
    assert reports == [FIRST, SECOND]
    late.join()


def test_the_last_report_wakes_the_wait_and_nothing_polls_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    monkeypatch.setattr(linked_engine, "_FAILURE_POLL_S", 60.0)
    taken = []
    take = LinkStore.take_report
    monkeypatch.setattr(
        LinkStore, "take_report", lambda *args: (taken.append(args), take(*args))[1]
    )
    engine.store.put_report("connect", 2, FIRST)
    late = Timer(0.3, LinkStore.open(engine.link).put_report, ("connect", 3, SECOND))
    late.start()
    began_s = time.monotonic()
    reports = asyncio.run(engine.wait_reports("connect", time.monotonic() + 30))
    assert reports == [FIRST, SECOND]
    assert 0.2 < time.monotonic() - began_s < 5.0
    assert len(taken) == 2
    late.join()


def test_reports_are_waited_for_until_the_deadline() -> None:
    engine = make_engine()
    engine.store.put_report("connect", 3, SECOND)
    first, second = asyncio.run(engine.wait_reports("connect", time.monotonic() + 0.05))
    assert first.missing and second == SECOND


def test_stage_requests_are_numbered_and_leave_no_keys() -> None:
    engine = make_engine()
    rank = LinkStore.open(engine.link)
    num_keys = engine.store.num_keys
    for number in range(2):
        for i, report in enumerate((FIRST, SECOND)):
            rank.put_report("receive", 2 + i, report)
        staging = engine.stage(StageRequest(number), never, time.monotonic() + 5)
        assert asyncio.run(staging) == [FIRST, SECOND]
    assert engine.num_stage_requests == 2
    assert engine.store.num_keys == num_keys


def test_the_link_to_the_next_engine_is_kept_until_that_is_another_one() -> None:
    relay, next_engine = make_engine(), make_engine()
    next_engine.link = replace(next_engine.link, engine="engine-1", layouts="rules")
    first = relay.link_relay(next_engine, "127.0.0.1")
    assert first.link.relay == "engine-0" and first.link.engine == "engine-1"
    assert first.link.num_senders == relay.link.num_receivers
    assert first.link.layouts == ""
    assert first.link.store_port == first.store.port != next_engine.link.store_port
    assert relay.link_relay(next_engine, "127.0.0.1") is first
    other = make_engine()
    assert relay.link_relay(other, "127.0.0.1") is not first
