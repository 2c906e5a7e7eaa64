"""Sync reports: the error nearest the cause, one result per engine, and metrics."""

import pytest

from mcore_rl.weight_sync.controller.sync_report import (
    EngineSyncResult,
    SyncReport,
    find_root_error,
    summarize,
)
from mcore_rl.weight_sync.wire import Report

FINE = Report("trainer rank 0", digest="listed 1")
LATE = Report("trainer rank 1", error="waited for rank 0 of engine e", peer_lost=True)
CAUSE = Report("rank 0 of engine e", error="a byte changed")
OTHER_PLAN = Report("rank 0 of engine e", digest="listed 2")


@pytest.mark.parametrize(
    ("reports", "answer", "error"),
    [
        ([FINE, FINE], None, None),
        ([FINE, CAUSE], None, "rank 0 of engine e: a byte changed"),
        ([LATE, CAUSE], None, "rank 0 of engine e: a byte changed (and 1 more ranks failed)"),
        ([LATE, FINE], RuntimeError("no answer"), f"trainer rank 1: {LATE.error}"),
        ([FINE], RuntimeError("no answer"), "no answer"),
        ([FINE, OTHER_PLAN], None, "ranks followed different plans: ['listed 1', 'listed 2']"),
    ],
)
def test_the_error_nearest_the_cause_is_told(
    reports: list[Report], answer: Exception | None, error: str | None
) -> None:
    assert find_root_error(reports, answer) == error


def test_ranks_that_tell_their_digest_alone_must_follow_the_same_plan() -> None:
    assert find_root_error([FINE], digests={"listed 1"}) is None
    different = "ranks followed different plans: ['listed 1', 'listed 2']"
    assert find_root_error([FINE], digests={"listed 1", "listed 2"}) == different


def test_an_engine_took_the_bytes_of_all_its_ranks_and_the_time_of_the_slowest() -> None:
    received = [
        Report("a", num_bytes=10, num_buckets=1, seconds=0.5),
        Report("b", num_bytes=20, num_buckets=3, seconds=0.25, missing=True),
    ]
    assert summarize("e", received, "no") == EngineSyncResult(
        "e",
        num_bytes=30,
        num_buckets=4,
        transfer_seconds=0.5,
        error="no",
        missing_reports=True,
    )


def test_metrics_are_of_all_engines_but_what_relays_sent_is_not_the_trainers() -> None:
    mib = 2**20
    report = SyncReport(
        3,
        2.0,
        (
            EngineSyncResult("a", 4 * mib, 1, 1.0, pause_seconds=0.1, saved_bytes=3 * mib),
            EngineSyncResult("b", 4 * mib, 1, 1.5, pause_seconds=0.2, relay="a", verified=True),
            EngineSyncResult("c", 1 * mib, 1, 0.5, error="gone"),
        ),
    )
    assert report.metrics() == {
        "sync/seconds": 2.0,
        "sync/transfer_seconds": 1.5,
        "sync/pause_s": 0.2,
        "sync/mib": 9.0,
        "sync/trainer_mib": 5.0,
        "sync/saved_mib": 3.0,
        "sync/engines_failed": 1.0,
        "sync/engines_verified": 1.0,
    }
    assert report.failed == {"c": "gone"}
    assert report.serving == ("a", "b")
