"""A scene's processes answer with reports, bit-for-bit results and the time of each swap."""

import pytest

from mcore_rl.tools.doctor.sync_ranks import run_scene
from mcore_rl.tools.doctor.toy_engine import Scene, row_cut

pytestmark = pytest.mark.gloo


def test_reports_and_swaps_of_a_staged_scene() -> None:
    outcome = run_scene(Scene(row_cut, 1, 1, "bfloat16", staged=True, num_syncs=2))
    [received] = outcome.receivers
    assert [report.error for report in outcome.reports] == [None] * 6
    assert received.differing == []
    assert len(received.swap_seconds) == 2 and min(received.swap_seconds) > 0
    assert outcome.senders[0] is not None
    assert outcome.senders[0][2].num_bytes == received.reports[2].num_bytes > 0
