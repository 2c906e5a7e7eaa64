"""Ulimits of a child process that are set too low."""

import resource
from pathlib import Path

import pytest

from mcore_rl.tools.doctor.machine.needs import MachineNeeds, check_huge_pages, check_limits
from tests.support.machine_doctor import run_doctor


def lower(limit: int, value: int) -> None:
    resource.setrlimit(limit, (value, value))


def test_few_open_files_are_a_failure_that_says_which_limit_to_raise() -> None:
    run = run_doctor("--only", "limits", limit=lambda: lower(resource.RLIMIT_NOFILE, 256))
    [finding] = run.outcome("open files")
    assert run.status == 1
    assert (finding.outcome, finding.figures) == ("failed", {"limit": 256})
    assert "the hard limit is 256" in finding.remedy


def test_a_limit_that_does_for_one_machine_is_a_warning() -> None:
    run = run_doctor("--only", "limits", limit=lambda: lower(resource.RLIMIT_NOFILE, 4096))
    [finding] = run.outcome("open files")
    assert finding.outcome == "warning"
    assert run.status == (1 if run.summary["failed"] else 0)


def test_few_processes_are_a_failure() -> None:
    run = run_doctor("--only", "limits", limit=lambda: lower(resource.RLIMIT_NPROC, 700))
    [finding] = run.outcome("processes")
    assert (finding.outcome, finding.figures) == ("failed", {"limit": 700})


def test_all_limits_of_this_process_are_shown() -> None:
    checks = {finding.check for finding in check_limits(MachineNeeds())}
    assert {"open files", "processes", "locked memory"} <= checks


@pytest.mark.parametrize(
    ("setting", "outcome"),
    [("always [madvise] never", "ok"), ("always madvise [never]", "warning"), (None, "ok")],
)
def test_huge_pages_that_are_off_are_a_warning(setting, outcome: str, tmp_path: Path) -> None:
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    if setting:
        (folder / "enabled").write_text(setting + "\n")
    [finding] = check_huge_pages(MachineNeeds(), tmp_path)
    assert finding.outcome == outcome
