"""The commands about jobs, as a user types them; launch targets and texts for the shell."""

from pathlib import Path

import jinja2
import pytest

from launch.cli import add_commands
from launch.targets import TARGETS, load_launch
from launch.text import TEMPLATES, render
from mcore_rl.cli import main, make_parser
from tests.support.stub_inputs import stub_inputs


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
    words += stub_inputs(tmp_path, "qwen3_30b_a3b_grpo_32")
    assert main(["submit", "--dry-run", *words]) == 0
    out = capsys.readouterr().out
    assert "4 nodes of 8 GPUs and 64 CPUs" in out
    assert f"submit it with: sbatch --parsable {tmp_path}/launch/job.sh" in out


def test_the_shipped_launch_file_of_a_target_has_its_options() -> None:
    for name, target in TARGETS.items():
        assert type(load_launch(name, [])) is target.options


def test_a_missing_value_is_an_error() -> None:
    assert sorted(path.name for path in TEMPLATES.glob("*.jinja")) == [
        "kuberay_doctor.sh.jinja",
        "kuberay_job.sh.jinja",
        "kuberay_log.sh.jinja",
        "kuberay_stop.sh.jinja",
        "local.sh.jinja",
        "skypilot.sh.jinja",
        "slurm.sh.jinja",
    ]
    with pytest.raises(jinja2.UndefinedError):
        render("slurm.sh.jinja")
