"""The checks of a machine: chosen by name, each with a deadline, none hides what others find."""

import time

import pytest

from mcore_rl.tools.doctor.machine.checks import CHECKS, MachineCheck, choose_checks, run_check
from mcore_rl.tools.doctor.machine.needs import MachineNeeds


def test_checks_run_in_their_order_whatever_order_they_are_named_in() -> None:
    assert [check.name for check in choose_checks("ports, python")] == ["python", "ports"]
    assert choose_checks("") == CHECKS


def test_an_unknown_check_is_named() -> None:
    with pytest.raises(ValueError, match="--only=python,nope: no check 'nope'; there are python, "):
        choose_checks("python,nope")


def test_every_check_is_there_and_ends() -> None:
    for check in CHECKS:
        found = run_check(check, MachineNeeds())
        assert all("the check itself failed" not in finding.text for finding in found), found
        assert all("mcore_rl." not in finding.text for finding in found), found


def test_a_check_that_hangs_is_left_at_its_deadline(tmp_path) -> None:
    class Hanging(MachineCheck):
        def find(self, needs: MachineNeeds):
            time.sleep(5)
            return []

    began_s = time.monotonic()
    [finding] = run_check(Hanging("disk", "", "", deadline_s=0.2), MachineNeeds())
    assert (finding.outcome, finding.text) == ("failed", "no answer in 0.2 s")
    assert time.monotonic() - began_s < 2


def test_a_file_that_this_user_may_not_read_is_named_with_the_remedy() -> None:
    class Closed(MachineCheck):
        def find(self, needs: MachineNeeds):
            raise PermissionError(13, "Permission denied", "/model/model.safetensors")

    [finding] = run_check(Closed("model", "", ""), MachineNeeds())
    assert finding.text.startswith("/model/model.safetensors: no permission for user ")
    assert finding.remedy == "have its owner give it (chmod), or name another"


@pytest.mark.parametrize(
    ("module", "function", "text"),
    [
        ("finding", "no_such", "the check itself failed: AttributeError"),
        ("no_such", "check", "mcore_rl.tools.doctor.machine.no_such is not installed"),
    ],
)
def test_a_check_that_breaks_is_a_finding(module: str, function: str, text: str) -> None:
    [finding] = run_check(MachineCheck("x", module, function), MachineNeeds())
    assert finding.outcome == "failed" and finding.text.startswith(text)
