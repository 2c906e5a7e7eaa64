"""A finding that is not ok has a remedy, and only such a one."""

import pytest

from mcore_rl.tools.doctor.machine.finding import Finding, fail, ok, warn


def test_findings_carry_figures_and_their_node() -> None:
    finding = ok("shm", "24 MiB", size_mib=24).name_node("a")
    assert finding == Finding("shm", "ok", "24 MiB", figures={"size_mib": 24}, node="a")
    assert warn("shm", "24 MiB", "more").outcome == "warning"
    assert fail("shm", "24 MiB", "more").remedy == "more"


@pytest.mark.parametrize(
    ("outcome", "remedy"), [("ok", "do this"), ("failed", ""), ("warning", "")]
)
def test_a_failure_without_a_remedy_cannot_be_made(outcome, remedy: str) -> None:
    with pytest.raises(AssertionError):
        Finding("shm", outcome, "text", remedy)
