"""Connections between trainer and engine ranks in processes of their own, some of which fail."""

import pytest

from mcore_rl.tools.doctor.sync_ranks import run_scene
from mcore_rl.tools.doctor.toy_engine import Fault, Scene, column_cut, expert_cut, row_cut

pytestmark = pytest.mark.gloo

SCENES = {
    "row cut to one rank": Scene(row_cut, 2, 1),
    "column cut to two ranks, cast to bfloat16": Scene(column_cut, 3, 2, dtype="bfloat16"),
    "experts and replicas to two ranks, large buckets": Scene(
        expert_cut, 2, 2, bucket_bytes=1 << 20
    ),
    "one element per bucket": Scene(row_cut, 1, 1, bucket_bytes=1, num_syncs=1),
    "staged": Scene(row_cut, 3, 2, staged=True, num_syncs=3),
    "staged, thousands of messages": Scene(row_cut, 1, 1, bucket_bytes=1, staged=True, num_syncs=1),
    "between machines": Scene(column_cut, 2, 2, between_machines=True),
    "staged between machines": Scene(expert_cut, 2, 2, between_machines=True, staged=True),
}


QUICK = ("column cut to two ranks, cast to bfloat16", "staged between machines")


@pytest.mark.parametrize(
    "scene",
    [
        pytest.param(scene, id=name, marks=[pytest.mark.slow] * (name not in QUICK))
        for name, scene in SCENES.items()
    ],
)
def test_every_parameter_is_bit_for_bit_what_the_engines_own_loader_puts_there(
    scene: Scene,
) -> None:
    outcome = run_scene(scene)
    reports = outcome.reports
    assert [report.error for report in reports] == [None] * len(reports)
    assert len({report.digest for report in reports}) == 1
    assert [received.differing for received in outcome.receivers] == [[]] * scene.num_receivers
    sent_bytes = sum(sent[1].num_bytes for sent in outcome.senders if sent is not None)
    received_bytes = sum(received.reports[1].num_bytes for received in outcome.receivers)
    assert sent_bytes == received_bytes > 0
    num_ranks = scene.num_senders + scene.num_receivers
    assert outcome.num_keys <= 5 * num_ranks + 1, "keys of a sync were left in the store"


ROUTES = pytest.mark.parametrize(
    ("staged", "between_machines"),
    [
        pytest.param(False, False, id="in place", marks=pytest.mark.slow),
        pytest.param(True, False, id="staged"),
        pytest.param(False, True, id="between machines", marks=pytest.mark.slow),
    ],
)


@ROUTES
def test_a_byte_changed_in_transit_is_refused_by_name(staged: bool, between_machines: bool) -> None:
    fault = Fault(rank=1, message=2, kind="corrupt")
    scene = Scene(
        row_cut, 2, 1, num_syncs=1, fault=fault, staged=staged, between_machines=between_machines
    )
    outcome = run_scene(scene)
    report = outcome.receivers[0].reports[1]
    error = report.error
    assert (
        error is not None
        and "has checksum" in error
        and "trainer rank 1" in error
        and "weight" in error
    )
    assert not report.peer_lost
    other = outcome.senders[0]
    assert other is not None and (other[1].error is None or other[1].peer_lost)


@ROUTES
def test_a_killed_sender_fails_the_others_at_once_and_is_named(
    staged: bool, between_machines: bool
) -> None:
    fault = Fault(rank=1, message=3, kind="kill")
    scene = Scene(
        row_cut, 3, 2, num_syncs=1, fault=fault, staged=staged, between_machines=between_machines
    )
    outcome = run_scene(scene)
    reports = [received.reports[1] for received in outcome.receivers]
    assert max(report.seconds for report in reports) < scene.timeout_s / 2
    assert outcome.senders[1] is None
    errors = [report.error for report in reports]
    assert any(
        error and "from trainer rank 1" in error and "waited" in error for error in errors
    ), errors


@ROUTES
def test_a_stopped_sender_fails_the_others_at_the_deadline_and_is_named(
    staged: bool, between_machines: bool
) -> None:
    fault = Fault(rank=1, message=3, kind="stop")
    scene = Scene(
        row_cut,
        2,
        1,
        num_syncs=1,
        timeout_s=6.0,
        fault=fault,
        staged=staged,
        between_machines=between_machines,
    )
    outcome = run_scene(scene)
    report = outcome.receivers[0].reports[1]
    assert outcome.senders[1] is None
    assert report.error is not None
    assert "rank 0 of engine engine-0 waited" in report.error
    assert "from trainer rank 1" in report.error
    assert scene.timeout_s - 1 < report.seconds < scene.timeout_s + 10


def test_a_rank_that_never_comes_is_named_by_those_who_waited() -> None:
    scene = Scene(row_cut, 2, 1, timeout_s=2.0, num_syncs=0, absent_sender=1)
    outcome = run_scene(scene)
    assert outcome.senders[0] is not None
    for waiting in (outcome.senders[0][0], outcome.receivers[0].reports[0]):
        assert waiting.error is not None and "the facts of trainer rank 1" in waiting.error, (
            waiting.error
        )
