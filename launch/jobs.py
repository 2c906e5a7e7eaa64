"""Keeps which job belongs to a run's folder, and calls the commands of a scheduler."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mcore_rl.process.disk import write_whole

JOB_FILE = "job.json"
WAITING = "waiting"
RUNNING = "running"
ENDED = "ended"
_CALL_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class SubmittedJob:
    """A submitted job. `target` is a key of TARGETS, `id` the scheduler's name for it."""

    target: str
    id: str
    name: str
    folder: str


@dataclass(frozen=True)
class State:
    """How far a job is: WAITING, RUNNING or ENDED, in words, and its exit status if it is known."""

    phase: str
    text: str
    exit_status: int | None = None


def remember(job: SubmittedJob) -> None:
    write_whole(Path(job.folder) / JOB_FILE, json.dumps(asdict(job)) + "\n")


def find_job(run_dir: Path, folder_name: str) -> SubmittedJob:
    """The job of a run's folder. Raises ValueError if none was submitted from there."""
    path = run_dir / folder_name / JOB_FILE
    try:
        return SubmittedJob(**json.loads(path.read_text()))
    except FileNotFoundError:
        raise ValueError(
            f"{run_dir}: no job was submitted for this folder ({path} is missing)"
        ) from None


def call(command: Sequence[str], check: bool = True, timeout_s: float = _CALL_TIMEOUT_S) -> str:
    """Run a scheduler's command and return what it prints.

    Raises ValueError if it is not installed and, with `check`, RuntimeError with its words if it
    fails.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except FileNotFoundError:
        raise ValueError(
            f"{command[0]}: there is no such command on this machine; submit where it is installed,"
            " or write the files with --dry-run"
        ) from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(command)}: no answer within {timeout_s:g} s") from None
    if check and done.returncode != 0:
        words = done.stderr.strip() or done.stdout.strip()
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}: {words}")
    return done.stdout
