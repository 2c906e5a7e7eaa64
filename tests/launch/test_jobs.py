"""A run's folder remembers its job; a scheduler's answers become errors with its words."""

from pathlib import Path

import pytest

from launch.jobs import SubmittedJob, call, find_job, remember


def test_a_folder_remembers_its_job(tmp_path: Path) -> None:
    folder = tmp_path / "launch"
    folder.mkdir()
    job = SubmittedJob("slurm", "42", "train-run", str(folder))
    remember(job)
    assert find_job(tmp_path, "launch") == job
    with pytest.raises(ValueError, match="no job was submitted for this folder"):
        find_job(folder, "launch")


def test_a_scheduler_is_quoted_where_it_fails() -> None:
    assert call(["echo", "7"]) == "7\n"
    assert call(["false"], check=False) == ""
    with pytest.raises(RuntimeError, match="status 3: no such partition"):
        call(["bash", "-c", "echo no such partition >&2; exit 3"])
    with pytest.raises(ValueError, match="no-such-scheduler: there is no such command"):
        call(["no-such-scheduler"])
