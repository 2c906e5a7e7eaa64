"""The run folder's filesystem: read-only ones, and clocks of file servers beside this one."""

import os
import stat
import time
from pathlib import Path

import pytest

from mcore_rl.tools.doctor.machine.needs import MachineNeeds
from mcore_rl.tools.doctor.machine.space import (
    check_run_folder,
    check_time_of_files,
    find_existing,
)
from tests.support.machine_doctor import in_own_mounts, run_doctor


def test_a_run_folder_on_a_read_only_filesystem_is_a_failure(tmp_path: Path) -> None:
    """A mount and not a mode: root may write into a folder of any mode."""
    before = in_own_mounts(f"mount -t tmpfs -o ro,size=8m tmpfs {tmp_path}")
    run = run_doctor("--only", "folder", "--run-dir", str(tmp_path / "runs/a"), before=before)
    [finding] = run.findings
    assert run.status == 1
    assert (finding.check, finding.outcome) == ("run folder", "failed")
    assert finding.text.startswith(f"cannot write into {tmp_path}: Read-only file system")
    assert "run.dir" in finding.remedy


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into a folder of any mode")
def test_a_run_folder_without_write_access_is_a_failure(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    [finding] = check_run_folder(MachineNeeds(run_dir=tmp_path))
    assert (finding.outcome, "Permission denied" in finding.text) == ("failed", True)


def test_a_full_filesystem_is_a_failure_and_not_a_traceback(tmp_path: Path) -> None:
    before = in_own_mounts(f"mount -t tmpfs -o size=8m tmpfs {tmp_path}")
    run = run_doctor("--only", "folder", "--run-dir", str(tmp_path), before=before)
    [finding] = run.findings
    assert finding.outcome == "failed" and "No space left on device" in finding.text


def test_a_good_folder_has_rates_and_is_left_as_it_was(tmp_path: Path) -> None:
    found = {f.check: f for f in check_run_folder(MachineNeeds(run_dir=tmp_path / "new"))}
    assert list(found) == ["write", "rename", "lock", "clock of files"]
    assert found["rename"].outcome == found["lock"].outcome == "ok"
    assert found["write"].figures["mib_per_s"] > 0
    assert found["rename"].figures["renames_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ahead_s", "outcome"), [(0.0, "ok"), (-10.0, "warning"), (10.0, "warning"), (60.0, "failed")]
)
def test_a_clock_beside_the_filesystems_is_found(
    ahead_s: float, outcome: str, tmp_path: Path
) -> None:
    finding = check_time_of_files(tmp_path, lambda: time.time() + ahead_s)
    assert finding.outcome == outcome
    assert finding.figures["skew_s"] == pytest.approx(-ahead_s, abs=1.5)


def test_the_folder_that_exists_stands_for_those_that_do_not(tmp_path: Path) -> None:
    assert find_existing(tmp_path / "a/b") == tmp_path
