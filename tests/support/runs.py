"""Starts runs of the command line in their own process, follows them, finds all their processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from mcore_rl.logs.rows import read_rows

MARK = "MCORE_RL_TEST_RUN"
SMALL = (
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_len=12",
    "rollout.deterministic=true",
    "eval.max_prompts=8",
    "run.call_timeout_s=60",
)


def tiny_settings(arithmetic: Path) -> list[str]:
    """Return the settings of the smallest possible steps on the model and data in this folder."""
    return [
        "recipe=tiny_moe_grpo",
        f"model.path={arithmetic / 'model'}",
        f"data.train=[{arithmetic / 'train.parquet'}]",
        f"eval.data=[{arithmetic / 'heldout.parquet'}]",
        f"sft.data=[{arithmetic / 'sft.parquet'}]",
        *SMALL,
    ]


class Run:
    """One `mcore-rl` command and every process under it.

    Processes are remembered as descendants while the command lives, and found by a mark in their
    environment; a title that a process gives itself may overwrite the mark.
    """

    def __init__(
        self, args: Sequence[str], run_dir: Path, program: Sequence[str] = ("-m", "mcore_rl.cli")
    ) -> None:
        self.mark, self.run_dir = uuid.uuid4().hex, run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self.began_s = time.time()
        self._seen: set[psutil.Process] = set()
        self._seen_lock = threading.Lock()
        self._log = run_dir / "logs" / "controller.log"
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self.output = run_dir.parent / f"{run_dir.name}-{self.mark[:6]}.out"
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *program, *args, f"run.dir={run_dir}"],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        threading.Thread(target=self._remember_all, daemon=True).start()

    def finish(self, timeout_s: float = 400.0) -> int:
        """Return the exit status; a run that outlasts `timeout_s` is killed and fails the test."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(
                f"no end after {timeout_s} s; last output:\n{self.tail()}"
            ) from None

    def tail(self, num_chars: int = 4000) -> str:
        return self.output.read_text(errors="replace")[-num_chars:]

    def metrics(self, subfolder: str = ".") -> list[dict[str, float]]:
        path = self.run_dir / subfolder / "metrics.jsonl"
        return read_rows(path)

    def log(self) -> str:
        """Return what this command, not an earlier one, wrote to the controller's log."""
        if not self._log.exists():
            return ""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def wait_for(self, text: str, timeout_s: float = 400.0, poll_s: float = 0.05) -> None:
        """Wait until the controller's log has `text`."""
        self.wait_until(lambda: text in self.log(), f"{text!r} in {self._log}", timeout_s, poll_s)
        self._remember()

    def wait_until(
        self, is_so: Callable[[], object], what: str, timeout_s: float = 400.0, poll_s: float = 0.05
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert self.process.poll() is None, f"ended while waiting for {what}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"no {what} after {timeout_s} s:\n{self.tail()}"
            time.sleep(poll_s)

    def find_one(self, *words: str, timeout_s: float = 400.0) -> psutil.Process:
        """Wait for processes whose command line has all `words`; return the oldest."""
        found: list[psutil.Process] = []
        seen: Counter[str] = Counter()
        began_s = time.monotonic()

        def is_there() -> bool:
            processes = [(p, _title(p)) for p in self.processes()]
            seen.update(title[:120] for _, title in processes)
            found[:] = [p for p, title in processes if all(word in title for word in words)]
            return bool(found)

        try:
            self.wait_until(is_there, f"process {words}", timeout_s)
        except AssertionError as error:
            took_s = time.monotonic() - began_s
            raise AssertionError(
                f"no process {words} in {took_s:.1f} s, only {seen}: {error}"
            ) from error
        return min(found, key=psutil.Process.create_time)

    def cpu_shares(self, seconds: float) -> dict[str, float]:
        """Return process -> share of a core that it uses during the next `seconds`."""
        processes = self.processes()
        before = {p: _cpu_seconds(p) for p in processes}
        time.sleep(seconds)
        return {
            f"{p.pid} {_title(p)[:80]}": (_cpu_seconds(p) - before[p]) / seconds for p in processes
        }

    def processes(self) -> list[psutil.Process]:
        """Return every living process of this run."""
        self._remember()
        with self._seen_lock:
            known = self._seen | find_marked(self.mark)
        return [p for p in known if _is_alive(p)]

    def _remember_all(self) -> None:
        while self.process.poll() is None:
            self._remember()
            time.sleep(0.5)

    def _remember(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            me = psutil.Process(self.process.pid)
            now = {me, *me.children(recursive=True)}
            with self._seen_lock:
                self._seen |= now

    def find(self, *words: str) -> list[psutil.Process]:
        """Return the run's processes whose command line has all `words`."""
        return [p for p in self.processes() if all(word in _title(p) for word in words)]

    def assert_nothing_left(self, within_s: float = 20.0) -> None:
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        names = [(p.pid, _title(p)[:80]) for p in left]
        self.kill_all()
        assert not left, f"processes left {within_s} s after the end: {names}"
        while (ownerless := _ownerless_memory(self.began_s)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not ownerless, f"shared memory left {within_s} s after the end: {ownerless}"

    def kill_all(self) -> None:
        for p in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                p.send_signal(signal.SIGKILL)


def _ownerless_memory(since_s: float) -> list[str]:
    """Return SGLang's shared memory made since then, whose maker is gone.

    It is called sgl_shm_<kind>_<pid>_<random>. A process that a test killed earlier may have left
    older memory.
    """
    names = []
    for path in Path("/dev/shm").glob("sgl_shm_*_*_*"):
        with contextlib.suppress(FileNotFoundError):
            is_new = path.stat().st_mtime >= since_s
            if is_new and not psutil.pid_exists(int(path.name.split("_")[-2])):
                names.append(path.name)
    return names


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _cpu_seconds(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def train_after_sft(recipe: str, data: Path, folder: Path, *options: str) -> dict[str, Any]:
    """Train a random model by SFT, then by RL, and return the summary of the whole.

    `data` is as a command of `mcore-rl data` writes it.
    """
    common = [
        f"recipe={recipe}",
        f"data.train=[{data / 'train.parquet'}]",
        f"eval.data=[{data / 'heldout.parquet'}]",
        f"sft.data=[{data / 'sft.parquet'}]",
        *options,
    ]
    imitation = [f"model.path={data / 'model'}", "model.init=random"]
    warm_start = Run(["sft", *common, *imitation], folder / "warm_start")
    assert warm_start.finish(600) == 0, warm_start.tail()
    run = Run(["train", *common, f"model.path={folder / 'warm_start' / 'hf'}"], folder / "run")
    assert run.finish(900) == 0, run.tail()
    run.assert_nothing_left()
    return json.loads((folder / "run" / "summary.json").read_text())


def find_marked(mark: str) -> set[psutil.Process]:
    """Return the processes whose environment has a mark, also those that a fork server started."""
    return {process for process in psutil.process_iter() if _has_mark(process, mark)}


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
