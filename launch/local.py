"""Runs a job on this machine, in the background; its nodes are processes with addresses of their
own.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from launch.jobs import ENDED, RUNNING, State, SubmittedJob
from launch.options import LocalOptions
from launch.submission import Submission, make_agent_options
from launch.text import render

SCRIPT = "job.sh"
LOG = "job.log"
_CANCEL_TIMEOUT_S = 120.0


def make_files(submission: Submission, options: LocalOptions) -> dict[str, str]:
    """A shell script, by file name."""
    nodes = range(submission.needs.nodes)
    script = render(
        "local.sh.jinja",
        submission=submission,
        options=options,
        cwd=str(Path.cwd()),
        names=[f"node{k}" for k in nodes],
        addresses=[f"127.0.0.{k + 2}" for k in nodes],  # all of 127.0.0.0/8 is this machine
        folder=str(submission.folder),
        python=shlex.quote(options.python or sys.executable),
        agent_options=[
            *make_agent_options(submission, options),
            *("--num-cpus", str(submission.needs.cpus_per_node)),
        ],
        arguments=submission.arguments,
    )
    return {SCRIPT: script}


def submit_command(submission: Submission) -> list[str]:
    return ["bash", str(submission.folder / SCRIPT)]


def submit(submission: Submission) -> str:
    """Start the script in the submission's folder in the background; return its process id."""
    with (submission.folder / LOG).open("a") as log:
        process = subprocess.Popen(
            submit_command(submission),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while process.poll() is None and not _runs_script(process.pid, submission.folder):
        time.sleep(0.01)  # its command line shows a moment after it started
    return str(process.pid)


def read_state(job: SubmittedJob) -> State:
    if _is_running(job):
        return State(RUNNING, f"process {job.id} runs")
    path = Path(job.folder) / f"job_{job.id}" / "status"
    if not path.exists():
        return State(ENDED, f"process {job.id} ended without a status: it was killed")
    status = int(path.read_text())
    return State(ENDED, f"process {job.id} ended with status {status}", status)


def log_command(job: SubmittedJob, follow: bool) -> list[str]:
    """A command that prints the job's log; with `follow` it goes on."""
    return ["tail", "--lines=+1", *(["--follow"] if follow else []), f"{job.folder}/{LOG}"]


def cancel(job: SubmittedJob) -> None:
    """Ask the run to save and to end, and wait until it has; afterwards kill it."""
    until = time.monotonic() + _CANCEL_TIMEOUT_S
    with suppress(ProcessLookupError):
        if _is_running(job):
            os.kill(int(job.id), signal.SIGTERM)
        while _is_running(job) and time.monotonic() < until:
            time.sleep(0.5)
        if _is_running(job):
            os.killpg(int(job.id), signal.SIGKILL)


def _is_running(job: SubmittedJob) -> bool:
    return _runs_script(int(job.id), Path(job.folder))


def _runs_script(pid: int, folder: Path) -> bool:
    """Whether the process runs the script in `folder`; its id may be another's by now."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return os.fsencode(folder / SCRIPT) in words
    return False
