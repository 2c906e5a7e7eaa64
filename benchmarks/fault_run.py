"""One run of `mcore-rl train` that is disturbed: its processes, the faults, what they cost.

A fault is done to a process of a kind. The run then takes two more steps, or ends, and the same
command goes on. After each fault the run is checked: that it went on in time, that no process of
the dead is left, that engines have the trainer's weights, and that the ledger balances.
"""

import atexit
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from fault_machine import can_set_clock, enter_namespace, jump_clock, slow_network
from mcore_rl.logs.ledger.balance import read_balance
from mcore_rl.logs.rows import read_rows

COMMAND = (sys.executable, "-m", "mcore_rl.cli")
MARK = "MCORE_RL_FAULTS_RUN"
POLL_S = 0.02
LEFT_S = 30.0
"""Processes may take so long to go after the end of their run."""
DRAINED_S = 120.0
"""So may a process after SIGTERM: SGLang first ends all requests."""
GOES_ON_S = 240.0
"""A run that takes no step for so long hangs."""
ENDS_S = 120.0
"""So does one that should end and does not."""
AGAIN_S = 900.0
"""The same command may take so long to start and to get back to its step."""
SMALL_BYTES = 64 << 10
MOST_DIFFERENCE = 1e-4
"""Between log-probs of engines and trainer, mean of a step: mixed weights differ far more."""
_CGROUP = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class Victim:
    """A kind of process, or a part of the machine.

    words    of its command line; (): the command itself or its child, the controller
    faults   what is done to it
    ends     whether the run must end by each of them
    but      a word that its command line does not have
    process  False: no process, but the machine's
    """

    words: tuple[str, ...]
    faults: tuple[str, ...]
    ends: bool = False
    but: str = "\0"
    process: bool = True


KILL, STOP, TERM, MEMORY, DISK = "SIGKILL", "SIGSTOP", "SIGTERM", "memory limit", "full disk"
SLOW, JUMP = "slow and lossy", "jump"
WORKER, KEEPER = "mcore_rl.agents.environments.worker", "mcore_rl.agents.environments.keeper"
VICTIMS = {
    "trainer rank": Victim(("ray::trainer_rank",), (KILL, STOP, TERM, MEMORY, DISK)),
    "critic rank": Victim(("ray::critic_rank",), (KILL, STOP, TERM)),
    "engine scheduler": Victim(("sglang::scheduler",), (KILL, STOP, MEMORY)),
    "engine server": Victim(("mcore_rl.rollout.server",), (KILL, STOP, TERM)),
    "collector": Victim(("ray::collector_rank",), (KILL, STOP, TERM, MEMORY)),
    "environment worker": Victim((WORKER,), (KILL, STOP, TERM, MEMORY), but=KEEPER),
    "worker's keeper": Victim((KEEPER,), (KILL, TERM)),
    "sandbox": Victim(("sandbox", "serve"), (KILL, STOP, TERM)),
    "search": Victim(("search", "serve"), (KILL, STOP, TERM)),
    "raylet": Victim(("raylet/raylet",), (KILL, STOP)),
    "GCS": Victim(("gcs_server",), (KILL, STOP)),
    "controller": Victim((), (KILL, STOP)),
    "command": Victim((), (KILL, TERM), ends=True),
    "network": Victim((), (SLOW,), process=False),
    "clock": Victim((), (JUMP,), process=False),
}
"""The gateway has no process of its own: it is part of the collector. A keeper of a worker does
nothing but wait for one of both to end, so a stopped one shows nowhere."""


@dataclass(frozen=True)
class Fault:
    """A fault that is to come `delay_s` after a step."""

    number: int
    kind: str
    how: str
    delay_s: float


@dataclass
class Struck:
    """The effects of a fault.

    step       that the run had taken when it came
    seconds    until the run had taken two more steps, and the steps gained in them
    ended      status of the command if it ended; None: it went on
    said       the last line of a command that ended
    problems   what went wrong beyond the fault; empty if all is well
    window_s   seconds since the window of the fault before, and the steps gained in them
    """

    number: int
    kind: str
    how: str
    step: int
    seconds: float = 0.0
    gained: int = 0
    ended: int | None = None
    said: str = ""
    problems: tuple[str, ...] = ()
    window_s: float = 0.0
    window_steps: int = 0


class TrainRun:
    """`mcore-rl train` in one folder, started again whenever it ends too early.

    namespace    network namespace that it runs in; None: the machine's own
    """

    def __init__(self, folder: Path, settings: Sequence[str], namespace: str | None = None) -> None:
        self.folder = folder
        self.settings = settings
        self.namespace = namespace
        self._output = folder.parent / f"{folder.name}.log"
        self._seen: set[psutil.Process] = set()
        self._began_s = 0.0
        self.process: psutil.Popen | None = None

    def start(self) -> None:
        """Start the command; it goes on where an earlier one ended."""
        self.mark = uuid.uuid4().hex
        self._began_s = time.monotonic()
        prefix = enter_namespace(self.namespace) if self.namespace else ()
        with self._output.open("a") as output:
            self.process = psutil.Popen(
                (*prefix, *COMMAND, "train", *self.settings, f"run.dir={self.folder}"),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self.mark},
                start_new_session=True,
            )
        atexit.register(_interrupt, self.process)
        threading.Thread(target=self._remember, args=(self.process,), daemon=True).start()

    def _remember(self, process: psutil.Popen) -> None:
        while process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                self._seen |= set(process.children(recursive=True))
            time.sleep(0.5)

    @property
    def has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def count_steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_text().count('"loss/total"') if path.exists() else 0

    def tail(self, num_chars: int = 4000) -> str:
        return (
            self._output.read_text(errors="replace")[-num_chars:] if self._output.exists() else ""
        )

    def wait_for_step(self, step: int, timeout_s: float = GOES_ON_S) -> bool:
        """Return whether the run has taken `step` in time; False also if it ended before."""
        until_s = time.monotonic() + timeout_s
        while self.count_steps() < step:
            if self.has_ended or time.monotonic() > until_s:
                return self.count_steps() >= step
            time.sleep(POLL_S)
        return True

    def find(self, victim: Victim) -> list[psutil.Process]:
        """Return the living processes of a kind."""
        assert self.process is not None
        if not victim.words:
            command = psutil.Process(self.process.pid)
            return [command] if victim.ends else command.children()
        titles = {process: _title(process) for process in self.list_living()}
        return [
            process
            for process, title in titles.items()
            if all(word in title for word in victim.words) and victim.but not in title
        ]

    def list_living(self) -> list[psutil.Process]:
        marked = {p for p in psutil.process_iter() if _has_mark(p, self.mark)}
        return [p for p in {*self._seen, *marked} if is_alive(p)]

    def end(self) -> list[str]:
        """Kill what is left of the run; return the titles of processes that outlived it."""
        assert self.process is not None
        was_over = self.has_ended
        until_s = time.monotonic() + LEFT_S
        while was_over and self.list_living() and time.monotonic() < until_s:
            time.sleep(0.2)
        left = self.list_living()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(LEFT_S)
        return [_title(process)[:80] for process in left] if was_over else []


def _interrupt(process: psutil.Popen) -> None:
    """End a run that a benchmark leaves behind which is interrupted itself."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(LEFT_S)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def strike(run: TrainRun, fault: Fault) -> Struck:
    """Do what `fault` says; see the run take two more steps, or end and go on; return how it was.

    The run must have taken a step.
    """
    time.sleep(fault.delay_s)
    victim = VICTIMS[fault.kind]
    struck = Struck(fault.number, fault.kind, fault.how, run.count_steps())
    began_s = time.monotonic()
    problems: list[str] = []
    if victim.process:
        _wait_while(run, lambda: not run.find(victim))
    found = run.find(victim) if victim.process else [None]
    if not found:
        problems.append(f"no process of kind {fault.kind}")
    else:
        chosen = random.Random(fault.number).choice(found)
        below = _list_children(chosen) if chosen else []
        with do_fault(run, chosen, fault.how):
            _follow(run, struck, victim.ends, problems)
        struck.seconds = time.monotonic() - began_s
        struck.gained = run.count_steps() - struck.step
        if chosen and fault.how != DISK:
            problems += _find_survivors(chosen, below, fault.how)
    problems += check_run(run.folder)
    struck.problems = tuple(problems)
    return struck


def _list_children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _follow(run: TrainRun, struck: Struck, ends: bool, problems: list[str]) -> None:
    """Wait until the run has taken two more steps, or has ended and then taken them."""
    wanted = max(struck.step, run.count_steps()) + 2
    if ends:
        _wait_for_end(run)
    went_on = not run.has_ended and run.wait_for_step(wanted)
    if went_on:
        if ends:
            problems.append("the run went on without a process that it needs")
        return
    if not run.has_ended:
        problems.append(f"hang: no step for {GOES_ON_S:g} s; {run.tail(300)!r}")
    else:
        assert run.process is not None
        struck.ended = run.process.returncode
        struck.said = next(iter(run.tail().strip().splitlines()[-1:]), "")[:300]
        if not ends:
            problems.append("the run ended")
    problems += [f"left after the end: {title}" for title in run.end()]
    again = run.count_steps() + 1
    run.start()
    if not run.wait_for_step(again, AGAIN_S):
        problems.append(f"the same command did not go on: {run.tail(300)!r}")


def _wait_for_end(run: TrainRun) -> None:
    until_s = time.monotonic() + ENDS_S
    while not run.has_ended and time.monotonic() < until_s:
        time.sleep(POLL_S)


@contextmanager
def do_fault(run: TrainRun, process: psutil.Process | None, how: str) -> Iterator[None]:
    """Do a fault to a process, or to the machine (None); its cause is gone after the block."""
    if how == DISK:
        with fill_disk(run):
            yield
    elif how == SLOW:
        assert run.namespace is not None
        with slow_network(run.namespace):
            yield
    elif how == JUMP:
        with jump_clock():
            yield
    elif process is not None and how == MEMORY:
        with limit_memory(process):
            yield
    elif process is not None:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.Signals[how])
        yield


@contextmanager
def limit_memory(process: psutil.Process) -> Iterator[None]:
    """Give a process too little memory for its next pages, so that the kernel kills it."""
    group = _CGROUP / f"mcore_rl_faults_{process.pid}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(SMALL_BYTES))
        with suppress(OSError):  # it has ended meanwhile
            (group / "cgroup.procs").write_text(str(process.pid))
        # A process that uses its memory again asks for pages of files alone, which it gives back.
        with suppress(OSError):  # it has other pages, and dies when it asks for more
            (group / "memory.limit_in_bytes").write_text("0")
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (_CGROUP / "cgroup.procs").write_text(pid)
        group.rmdir()


@contextmanager
def fill_disk(run: TrainRun) -> Iterator[None]:
    """Put a full filesystem in the place of the checkpoints, until a save has failed there."""
    folder = run.folder / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    _wait_while(run, lambda: any(folder.glob("*.incomplete")))
    before = count_lost_saves(run)
    size = f"size={SMALL_BYTES}"
    subprocess.run(("mount", "-t", "tmpfs", "-o", size, "full", str(folder)), check=True)
    try:
        _wait_while(run, lambda: count_lost_saves(run) == before)
    finally:
        subprocess.run(("umount", "-l", str(folder)), check=True)
    yield


def count_lost_saves(run: TrainRun) -> int:
    log = run.folder / "logs" / "controller.log"
    return (
        log.read_text(errors="replace").count("is lost, and the run goes on") if log.exists() else 0
    )


def _wait_while(run: TrainRun, is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + GOES_ON_S
    while is_so() and not run.has_ended and time.monotonic() < until_s:
        time.sleep(POLL_S)


def find_unavailable(namespace: str | None) -> dict[str, str]:
    """Return the faults that cannot be done on this machine, and why."""
    unavailable = {}
    if namespace is None:
        unavailable[SLOW] = "a network namespace needs root, and iproute2 and nftables"
    if not can_set_clock():
        unavailable[JUMP] = "this process may not set the clock"
    if os.geteuid():
        unavailable[DISK] = "mounting a small filesystem needs root"
    if not os.access(_CGROUP / "cgroup.procs", os.W_OK):
        unavailable[MEMORY] = f"{_CGROUP} cannot be written"
    return unavailable


def _find_survivors(
    process: psutil.Process, below: Sequence[psutil.Process], how: str
) -> list[str]:
    """Return problems: a victim that lives after its fault, or a process that was below it."""
    until_s = time.monotonic() + (DRAINED_S if how == "SIGTERM" else LEFT_S)
    while any(map(is_alive, (process, *below))) and time.monotonic() < until_s:
        time.sleep(POLL_S)
    living = [p for p in (process, *below) if is_alive(p)]
    return [f"alive after the fault: {_title(p)[:80]}" for p in living]


def check_run(folder: Path) -> list[str]:
    """Return problems of books and weights."""
    try:
        balance = read_balance(folder)
    except ValueError as error:
        return [f"no ledger: {error}"]
    problems = [f"ledger: {line}" for line in balance.imbalances[:3]]
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "logprob_diff/mean" in row]
    worst = max((row["logprob_diff/mean"] for row in rows), default=0.0)
    if worst > MOST_DIFFERENCE:
        problems.append(f"mixed weights? log-probs differ by {worst:.2g} on average")
    return problems
