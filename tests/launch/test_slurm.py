"""The sbatch script of each kind of job, and what is made of SLURM's answers."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launch.options import SlurmOptions
from launch.slurm import SCRIPT, make_files, parse_job_state, submit_command
from launch.submission import Submission
from mcore_rl.planning.bundles import NodeNeeds

GOLDEN = Path(__file__).parent / "golden"
SETTINGS = ("recipe=qwen3_235b_a22b_grpo_64_64", "eval.data=[a.parquet]")
KINDS = {
    "plain": SlurmOptions(python="/shared/venv/bin/python", partition="h100", account="ml"),
    "pyxis": SlurmOptions(
        container="pyxis",
        image="/images/mcore_rl.sqsh",
        mounts=["/data:/data"],
        setup=["module load cuda"],
        environment={"NCCL_IB_HCA": "mlx5", "GREETING": "it's on"},
        time_limit="4:00:00",
        interface="bond0",
        requeues=0,
    ),
    "apptainer": SlurmOptions(container="apptainer", image="mcore_rl.sif", seeds=[0, 3]),
    "two_partitions": SlurmOptions(
        python="python3",
        partition="h100",
        constraint="ib",
        engine_partition="l40s",
        sbatch=["--mail-type=END"],
        exclusive=False,
        memory_gib_per_node=1800,
    ),
}


def submission(kind: str) -> Submission:
    needs = NodeNeeds(16, 8 if kind == "two_partitions" else 0, 8, 64)
    return Submission("train", SETTINGS, Path("/shared/runs/a run"), needs)


@pytest.mark.parametrize("kind", KINDS)
def test_the_script_is_the_reviewed_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    script = make_files(submission(kind), KINDS[kind])[SCRIPT]
    golden = GOLDEN / f"slurm_{kind}.sh"
    if os.environ.get("REWRITE_GOLDEN"):
        golden.write_text(script)
    assert script == golden.read_text()
    assert len(script.splitlines()) < 60
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"engine_partition": "l40s"}, (), "takes cluster.separate_nodes=true"),
        ({"seeds": [1]}, ("run.seed=4",), r"launch.seeds=\[1\] and run.seed are both given"),
    ],
)
def test_options_that_contradict_one_another_are_refused(options, settings, message) -> None:
    made = Submission("train", settings, Path("/runs/a"), NodeNeeds(2, 0, 8, 64))
    with pytest.raises(ValueError, match=message):
        make_files(made, SlurmOptions(**options))


def test_an_array_of_heterogeneous_jobs_is_refused() -> None:
    with pytest.raises(ValueError, match="SLURM has no arrays of heterogeneous jobs"):
        make_files(submission("two_partitions"), SlurmOptions(engine_partition="l40s", seeds=[1]))


def test_the_job_is_submitted_from_its_folder() -> None:
    assert submit_command(submission("plain"))[-1] == "/shared/runs/a run/launch/job.sh"


@pytest.mark.parametrize(
    ("facts", "phase", "text", "status"),
    [
        (
            "JobState=PENDING Reason=Priority Restarts=2",
            "waiting",
            "waits (Priority, restart 2)",
            None,
        ),
        (
            "JobState=RUNNING NodeList=n[1-2] RunTime=00:01:00 TimeLimit=04:00:00",
            "running",
            "runs on n[1-2] for 00:01:00 of 04:00:00",
            None,
        ),
        ("JobState=COMPLETED ExitCode=0:0", "ended", "ended: COMPLETED, status 0", 0),
        ("JobState=FAILED ExitCode=2:0", "ended", "ended: FAILED, status 2", 2),
        ("JobState=CANCELLED ExitCode=0:15", "ended", "ended: CANCELLED, status 143", 143),
        ("JobState=NODE_FAIL ExitCode=1:0", "ended", "ended: NODE_FAIL, status 1", 1),
    ],
)
def test_the_state_of_a_job(facts: str, phase: str, text: str, status: int | None) -> None:
    state = parse_job_state(f"JobId=7 JobName=train-a {facts}", out_of_service=())
    assert (state.phase, state.text, state.exit_status) == (phase, f"job 7 {text}", status)


def test_nodes_that_are_out_of_service_are_named_to_who_waits() -> None:
    drained = "n2 drained: broken fan"
    waiting = parse_job_state("JobId=7 JobState=PENDING Reason=Resources", [drained])
    assert (
        waiting.text == "job 7 waits (Resources, restart 0); out of service: n2 drained: broken fan"
    )


FINISH = """
while [ $# -gt 1 ]; do
    [ "$1" != --folder ] || echo "{\\"status\\": $STATUS}" > "$2/done.json"
    shift
done
exit 143
"""
"""The run notes its status; SLURM terminates another task, whose status is higher."""


def run_script(
    folder: Path, statuses: list[int], options: SlurmOptions, srun: str = 'exit "$STATUS"'
) -> list[str]:
    """Run the job's script, whose run ends with the statuses in turn; return what became of it.

    A requeue runs the script again, as SLURM does. `srun`: the lines of that program.
    """
    made = Submission("train", ("recipe=a",), folder / "a run", NodeNeeds(1, 0, 0, 4))
    script = folder / SCRIPT
    script.write_text(make_files(made, options)[SCRIPT])
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name, body in {
        "srun": srun,
        "scontrol": '[ "$1" = show ] && echo "NodeName=n1 NodeAddr=10.0.0.1" || echo requeued',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    ends = []
    for attempt, status in enumerate(statuses):
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "STATUS": str(status),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_RESTART_COUNT": str(attempt),
        }
        done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (status, "")
        ends.append("requeued" if "requeued" in done.stdout else "ended")
    return ends


@pytest.mark.parametrize(
    ("statuses", "options", "ends"),
    [
        ([75, 1, 137, 75, 0], {}, ["requeued"] * 4 + ["ended"]),
        ([1, 1, 1, 1], {}, ["requeued"] * 3 + ["ended"]),
        ([1, 75, 1], {"retries": 1}, ["requeued", "requeued", "ended"]),
        ([1], {"retries": 0}, ["ended"]),
        ([75, 1, 75], {"requeues": 2}, ["requeued", "requeued", "ended"]),
        ([1], {"requeues": 0}, ["ended"]),
        ([2], {}, ["ended"]),
        ([143], {}, ["ended"]),
        ([130], {}, ["ended"]),
    ],
)
def test_a_job_that_saved_or_failed_is_queued_again_within_its_budget(
    tmp_path: Path, statuses: list[int], options: Any, ends: list[str]
) -> None:
    assert run_script(tmp_path, statuses, SlurmOptions(python="python3", **options)) == ends


def test_the_status_of_the_run_counts_and_not_that_of_a_task_that_slurm_ended(
    tmp_path: Path,
) -> None:
    statuses, ends = [75, 0], ["requeued", "ended"]
    assert run_script(tmp_path, statuses, SlurmOptions(python="python3"), FINISH) == ends
