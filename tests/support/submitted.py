"""Submits runs by the command line and follows their jobs."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from launch.jobs import SubmittedJob, find_job
from launch.targets import TARGETS
from mcore_rl.logs.rows import read_rows

MARK = "MCORE_RL_TEST_JOB"
Settings = Sequence[str]


class SubmittedRun:
    """A run that `mcore-rl submit` started; its processes carry a mark in their environment."""

    def __init__(self, settings: Settings, run_dir: Path) -> None:
        self.run_dir, self._mark = run_dir, uuid.uuid4().hex
        self.environment = {**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1"}
        self.told = self.mcore_rl("submit", *settings, f"run.dir={run_dir}")

    def mcore_rl(self, *arguments: str) -> str:
        """Return what a command prints that has to succeed."""
        done = subprocess.run(
            [sys.executable, "-m", "mcore_rl.cli", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def job(self) -> SubmittedJob:
        return find_job(self.run_dir, "launch")

    def status(self) -> str:
        """Return what `mcore-rl status` prints, without the start of a process."""
        return TARGETS[self.job.target].read_state(self.job).text

    def printed(self) -> str:
        """Return what the job printed so far, in all its attempts."""
        logs = sorted((self.run_dir / "launch").glob("*.log"))
        return "".join(log.read_text(errors="replace") for log in logs)

    def controller_log(self) -> str:
        log = self.run_dir / "logs" / "controller.log"
        return log.read_text() if log.exists() else ""

    def wait_for(self, text: str, timeout_s: float = 120.0) -> None:
        """Wait until the controller's log has `text`."""
        self.wait_until(lambda: text in self.controller_log(), repr(text), timeout_s)

    def wait_until(
        self, is_so: Callable[[], bool], what: str, timeout_s: float = 120.0, poll_s: float = 0.2
    ) -> None:
        until = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < until, (
                f"no {what}:\n{self.status()}\n{self.printed()[-3000:]}"
            )
            time.sleep(poll_s)

    def wait_ended(self, status: int = 0, timeout_s: float = 150.0) -> None:
        """Wait until the job ended with `status`."""
        self.wait_until(lambda: " ended" in self.status(), "end", timeout_s)
        assert self.status().endswith(f"status {status}"), self.status() + self.printed()[-3000:]

    def metrics(self) -> list[dict[str, float]]:
        path = self.run_dir / "metrics.jsonl"
        return read_rows(path)

    def processes(self) -> list[psutil.Process]:
        """Return the live processes of the job, in whatever session they are."""
        return [process for process in psutil.process_iter() if self._is_of_job(process)]

    def kill_raylet(self, address: str) -> None:
        """Kill the Ray of the node with this address."""
        words = {process: " ".join(process.cmdline()) for process in self.processes()}
        [raylet] = [p for p in words if p.name() == "raylet" and address in words[p]]
        raylet.kill()

    def wait_until_nothing_is_left(self, timeout_s: float = 20.0) -> None:
        until = time.monotonic() + timeout_s
        while left := self.processes():
            assert time.monotonic() < until, [" ".join(p.cmdline())[:150] for p in left]
            time.sleep(0.2)

    def kill(self) -> None:
        for process in self.processes():
            process.kill()

    def _is_of_job(self, process: psutil.Process) -> bool:
        if process.pid == os.getpid():
            return False
        try:
            return process.environ().get(MARK) == self._mark
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            return False
