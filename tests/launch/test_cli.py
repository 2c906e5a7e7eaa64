"""The commands about jobs, as a user types them."""

from pathlib import Path

import pytest

from launch.cli import add_commands
from mcore_rl.cli import main, make_parser


def test_all_commands_are_there() -> None:
    shown = make_parser().format_help()
    assert all(f"\n    {name} " in shown for name in ("submit", "status", "logs", "cancel"))
    assert add_commands.__doc__


@pytest.mark.parametrize("command", ["status", "logs", "cancel"])
def test_a_folder_without_a_job_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path)]) == 2
    assert f"{tmp_path}: no job was submitted for this folder" in capsys.readouterr().err


def test_a_dry_run_prints_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=qwen3_30b_a3b_grpo_32", f"run.dir={tmp_path}", "launch=slurm"]
    assert main(["submit", "--dry-run", *words]) == 0
    out = capsys.readouterr().out
    assert "4 nodes of 8 GPUs and 64 CPUs" in out
    assert f"submit it with: sbatch --parsable {tmp_path}/launch/job.sh" in out
