"""Kills a part of a run in one of its phases, and says what the user must then see."""

import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.books import assert_books_balance
from tests.support.runs import Run

EXIT_WITHIN_S = 60.0


@dataclass(frozen=True)
class Victim:
    """A process, found by `words` of its command line, and what its death must lead to.

    Without words it is the controller.
    """

    words: tuple[str, ...]
    message: str
    status: int = 1
    signal_number: int = signal.SIGKILL


ENGINE_DIED = (
    r"engine http://\S+ \(log \S+sglang_0\.log\)"
    r" (died \(status -9\)|exited with status \S+ while starting)"
)
VICTIMS = {
    "rank": Victim(
        ("trainer_rank1",),
        r"trainer rank 1.* died \(killed.*\) during .*; log \S+trainer_rank1\.log",
    ),
    "critic": Victim(
        ("critic_rank0",), r"critic rank 0.* died \(killed.*\) during .*; log \S+critic_rank0\.log"
    ),
    "server": Victim(("mcore_rl.rollout.server",), ENGINE_DIED),
    "scheduler": Victim(("sglang::scheduler",), ENGINE_DIED),
    "controller": Victim(
        (), r"the controller \(process \d+\) (was killed|and Ray's .* died together)", status=-9
    ),
    "interrupted": Victim((), "interrupted", status=130, signal_number=signal.SIGINT),
    "raylet": Victim(("raylet/raylet",), r"Ray's raylet process (died|.*died together)"),
    "gcs": Victim(("gcs_server",), r"Ray's gcs_server process (died|.*died together)"),
}

PHASES = {
    "start-up": "start-up",
    "evaluation": "step 0: evaluation",
    "rollout": "step {step}: rollout",
    "logprobs": "step {step}: logprobs",
    "train": "step {step}: train",
    "sync": "step {step}: sync",
    "checkpoint": "step {step}: checkpoint",
    "save": "",
    "export": "export",
}
"""Phase -> its line in the controller's log; a save has none, as it goes on behind other phases."""


def kill_in_phase(run: Run, victim: Victim, phase: str) -> None:
    """Kill the victim and check the end: status, deadline, message, and that nothing is left.

    The run succeeds if the victim was not needed any more: an engine in the export, anyone after
    it.
    """
    step = newest_step(run.run_dir) + 2
    if phase == "start-up":
        run.wait_for(PHASES[phase])
        process = _process(run, victim)
    else:
        run.wait_for("start-up")
        process = _process(run, victim)
        if phase == "save":
            run.wait_until(lambda: _is_being_saved(run), "a save under way", poll_s=0.002)
        else:
            run.wait_for(PHASES[phase].format(step=step), poll_s=0.002)
    killed_s = time.monotonic()
    if victim.signal_number == signal.SIGINT:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to every process of the run
    else:
        process.send_signal(victim.signal_number)
    status = run.finish(EXIT_WITHIN_S)
    seconds = time.monotonic() - killed_s
    run.assert_nothing_left()
    said = [line for line in run.tail(100_000).splitlines() if line.startswith("mcore-rl: ")]
    at = run.log().strip().splitlines()[-1].partition("mcore_rl.")[2]
    print(f"{phase:10s} exit {status} after {seconds:4.1f} s at {at!r}: {said}")
    assert not re.search(r"^Traceback", run.tail(), re.MULTILINE), run.tail()
    if phase == "export" and status == 0:
        assert not said, run.tail()
        return
    assert status == victim.status, run.tail()
    assert len(said) == 1, run.tail()
    assert re.search(victim.message, said[0]), run.tail()


def assert_complete(run: Run, num_steps: int) -> None:
    """Check that a run that was killed has every row once: no gaps, no duplicates, true books."""
    rows = [line["step"] for line in run.metrics() if "loss/total" in line]
    assert rows == list(range(1, num_steps + 1)), rows
    evaluations = [line["step"] for line in run.metrics() if "eval/greedy_accuracy" in line]
    assert evaluations == [0, num_steps], evaluations
    assert newest_step(run.run_dir) == num_steps
    assert (run.run_dir / "hf" / "model.safetensors.index.json").is_file()
    assert_books_balance(run.run_dir, num_steps)


def newest_step(run_dir: Path) -> int:
    """Return the newest step of the checkpoints, all of which must be complete; 0 without one."""
    complete = [p for p in run_dir.glob("checkpoints/step_*") if re.fullmatch(r"step_\d+", p.name)]
    assert all((p / "metadata.json").is_file() and _parts(p) for p in complete), complete
    return max((int(p.name.removeprefix("step_")) for p in complete), default=0)


def _is_being_saved(run: Run) -> bool:
    """Return whether this command, not an earlier one that was killed, is saving."""
    folders = run.run_dir.glob("checkpoints/*.incomplete")
    return any(_parts(p) and p.stat().st_mtime > run.began_s for p in folders)


def _parts(folder: Path) -> Sequence[Path]:
    return list(folder.glob("*.distcp"))


def _process(run: Run, victim: Victim) -> psutil.Process:
    return run.find_one(*victim.words) if victim.words else psutil.Process(run.process.pid)


def count_processes(run: Run) -> list[int]:
    """Return how many processes each of two trainer ranks has had."""
    logs = [run.run_dir / "logs" / f"trainer_rank{rank}.log" for rank in (0, 1)]
    return [len(re.findall(r"^process \d+ on ", log.read_text(), re.MULTILINE)) for log in logs]
