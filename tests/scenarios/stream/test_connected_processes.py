"""Connections between trainer and engine ranks in processes of their own, some of which fail."""

from typing import Any

import pytest
import torch

from mcore_rl.stream.wire import Report
from tests.support.processes import Fault, Scene, expected_parameters, run_scene
from tests.support.sync_layouts import column_cut, expert_cut, row_cut

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


def all_reports(senders: list[list[Report]], receivers: list[Any]) -> list[Report]:
    """The reports of all ranks, by rank and then by action."""
    by_rank = [*senders, *(reports for reports, _ in receivers)]
    return [report for reports in by_rank for report in reports]


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
def test_every_parameter_is_bit_for_bit_what_the_engines_own_loader_puts_there(
    scene: Scene,
) -> None:
    senders, receivers, num_keys = run_scene(scene)
    reports = all_reports(senders, receivers)
    assert [report.error for report in reports] == [None] * len(reports)
    assert len({report.digest for report in reports}) == 1
    for rank, (_, tensors) in enumerate(receivers):
        expected = expected_parameters(scene, rank, version=scene.num_syncs - 1)
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    sent_bytes = sum(rank_reports[1].num_bytes for rank_reports in senders)
    received_bytes = sum(rank_reports[1].num_bytes for rank_reports, _ in receivers)
    assert sent_bytes == received_bytes > 0
    num_ranks = scene.num_senders + scene.num_receivers
    assert num_keys <= 5 * num_ranks + 1, "keys of a sync were left in the store"


ROUTES = pytest.mark.parametrize(
    ("staged", "between_machines"),
    [(False, False), (True, False), (False, True)],
    ids=["in place", "staged", "between machines"],
)


@ROUTES
def test_a_byte_changed_in_transit_is_refused_by_name(staged: bool, between_machines: bool) -> None:
    fault = Fault(rank=1, message=2, kind="corrupt")
    scene = Scene(
        row_cut, 2, 1, num_syncs=1, fault=fault, staged=staged, between_machines=between_machines
    )
    senders, [(reports, _)], _ = run_scene(scene)
    error = reports[1].error
    assert (
        error is not None
        and "has checksum" in error
        and "trainer rank 1" in error
        and "weight" in error
    )
    assert not reports[1].peer_lost
    assert senders[0][1].error is None or senders[0][1].peer_lost


@ROUTES
def test_a_killed_sender_fails_the_others_at_once_and_is_named(
    staged: bool, between_machines: bool
) -> None:
    fault = Fault(rank=1, message=3, kind="kill")
    scene = Scene(
        row_cut, 3, 2, num_syncs=1, fault=fault, staged=staged, between_machines=between_machines
    )
    senders, receivers, _ = run_scene(scene)
    assert max(reports[1].seconds for reports, _ in receivers) < scene.timeout_s / 2
    assert senders[1] is None
    errors = [reports[1].error for reports, _ in receivers]
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
    senders, [(reports, _)], _ = run_scene(scene)
    assert senders[1] is None
    assert reports[1].error is not None
    assert "rank 0 of engine engine-0 waited" in reports[1].error
    assert "from trainer rank 1" in reports[1].error
    assert scene.timeout_s - 1 < reports[1].seconds < scene.timeout_s + 10


def test_a_rank_that_never_comes_is_named_by_those_who_waited() -> None:
    scene = Scene(row_cut, 2, 1, timeout_s=2.0, num_syncs=0, absent_sender=1)
    [[report], _], [(reports, _)], _ = run_scene(scene)
    for waiting in (report, reports[0]):
        assert waiting.error is not None and "the layout of trainer rank 1" in waiting.error, (
            waiting.error
        )
