"""Runs a command in a child process, and runs it again where the child is lost.

    command -o- waits, and holds memory that the child gives it -----------o--------- ends likewise
             '- child: Ray, ranks, engines ... is killed, or loses Ray     |
                                   the next child: finds the memory -------'

A child is lost if it ends otherwise than by `exit`: it was killed, it crashed, or it left by
os._exit because Ray is gone. One that is stopped for STOPPED_S, while the command is not, is
killed. If the command itself is killed, the child is killed with it.

A signal for the command is passed on to the child. A terminal or a scheduler signals both; then
the child has the signal already, and it is not repeated.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never

from mcore_rl.process.parent_death import die_with_parent
from mcore_rl.process.process_state import STOPPED, RestartBudget, describe_state

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that are passed on."""
SAME_S = 0.25
"""A signal that the child got so shortly before or after the command is the same one."""
STOPPED_S = 10
"""How long a child may be stopped (SIGSTOP). By Ctrl-Z the command is stopped as well."""
SESSION_S = 60.0
"""How long a lost child's processes may take to end."""
RESUME_HINT = "The same command continues from the newest checkpoint"
_POLL_S = 0.05
_MESSAGE_BYTES = 4096
_STATE = "state of the loop"


@dataclass
class _Held:
    """Memory of the children by name, which the command holds, and the folder of the session."""

    memory: dict[str, int] = field(default_factory=dict)
    session: str = ""
    is_ready: bool = False
    has_ended: bool = False

    def read(self, link: socket.socket) -> bool:
        """Take a message of the child; return False if there is none."""
        content, descriptors, _, _ = socket.recv_fds(link, _MESSAGE_BYTES, 1)
        if not content:
            return False
        message: dict[str, Any] = json.loads(content)
        if (name := message.get("memory")) is not None:
            self._replace(name, descriptors)
        self.session = message.get("session", self.session)
        self.is_ready |= "ready" in message
        self.has_ended |= "ended" in message
        return True

    def _replace(self, name: str, descriptors: list[int]) -> None:
        if name in self.memory:
            os.close(self.memory.pop(name))
        for descriptor in descriptors:
            self.memory[name] = descriptor


class _Child:
    """This process's link to the command that waits for it."""

    def __init__(self, link: socket.socket, memory: Mapping[str, int]) -> None:
        self._link = link
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.memory = dict(memory)

    def send(self, message: Mapping[str, object], *descriptors: int) -> None:
        if os.getpid() != self._pid:
            return  # this is a fork, whose end says nothing
        with self._lock, contextlib.suppress(OSError):  # the command is gone, and kills this one
            socket.send_fds(self._link, [json.dumps(message).encode()], descriptors)

    def watch_signals(self) -> None:
        """Pass signals of the command on to this process, in a thread; for the main thread."""
        woken, wakes = socket.socketpair()
        wakes.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        self._wakes = wakes  # Python writes the number of each signal there
        threading.Thread(target=self._repeat, args=(woken,), name="signals", daemon=True).start()

    def _repeat(self, woken: socket.socket) -> None:
        seen_s: dict[int, float] = {}
        due_s: dict[int, float] = {}
        while True:
            wait_s = max(min(due_s.values()) - time.monotonic(), 0.0) if due_s else None
            readable, _, _ = select.select([woken, self._link], [], [], wait_s)
            now_s = time.monotonic()
            if woken in readable:
                for number in woken.recv(64):
                    seen_s[number] = now_s
                    due_s.pop(number, None)
            if self._link in readable:
                content = self._link.recv(64)
                if not content:
                    return  # the command is gone
                for number in content:
                    if now_s - seen_s.get(number, -SAME_S) >= SAME_S:
                        due_s[number] = now_s + SAME_S
            for number in [number for number, at_s in due_s.items() if at_s <= now_s]:
                del due_s[number]
                os.kill(os.getpid(), number)


_child: _Child | None = None


def run_in_child(most: int) -> bool:
    """Go on in a child process; return there whether it takes the place of one that was lost.

    The calling process never returns from this: it exits with the status of the last child, or 128
    plus the number of the signal that ended it. Only for a main thread without others.

    most   children within an hour that may take the place of lost ones
    """
    held = _Held()
    budget = RestartBudget()
    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    waiting: list[int] = []
    is_again = False
    while True:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        command = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _begin_child(command, theirs, held.memory, before)
            return is_again
        theirs.close()
        status = _wait(pid, ours, held, waiting)
        told = _describe_end(pid, status)
        if held.has_ended:
            _exit_like(status)
        if not held.is_ready:
            _tell(f"{told} before its first step. {RESUME_HINT}")
            _exit_like(status)
        if not budget.take(most):
            _tell(f"{told}; run.recovery.restarts={most} within an hour are spent. {RESUME_HINT}")
            _exit_like(status)
        if not _wait_for_session(held.session):
            _tell(f"{told}; its processes did not end within {SESSION_S:g} s. {RESUME_HINT}")
            _exit_like(status)
        _tell(f"{told}: it starts again ({budget.num_recent} of {most} within an hour)")
        is_again = True


def _begin_child(
    command: int, link: socket.socket, memory: Mapping[str, int], handlers: Mapping[int, Any]
) -> None:
    global _child
    die_with_parent(command)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    _child = _Child(link, memory)
    _child.watch_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    atexit.register(note_end)


def _wait(pid: int, link: socket.socket, held: _Held, waiting: list[int]) -> int:
    """Return the child's exit status, negative for a signal; take its messages until then.

    waiting   signals that came while there was no child
    """

    def pass_on(number: int, frame: object) -> None:
        try:
            link.send(bytes([number]), socket.MSG_DONTWAIT)
        except OSError:  # there is no child
            waiting.append(number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    while waiting:
        pass_on(waiting.pop(), None)
    ended = os.pidfd_open(pid)
    poller = select.poll()
    for descriptor in (link.fileno(), ended):
        poller.register(descriptor, select.POLLIN)
    is_over = False
    seconds_stopped = 0
    while not is_over:
        ready = {descriptor for descriptor, _ in poller.poll(1000)}
        is_over = ended in ready
        if not ready:
            seconds_stopped = seconds_stopped + 1 if describe_state(pid) == STOPPED else 0
            if seconds_stopped >= STOPPED_S:
                os.kill(pid, signal.SIGKILL)
        if link.fileno() in ready and not held.read(link):
            poller.unregister(link.fileno())
    link.setblocking(False)
    with contextlib.suppress(OSError):
        while held.read(link):
            pass
    link.close()
    os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _wait_for_session(session: str) -> bool:
    """Return whether the processes of a lost child, which others end, are gone in time."""
    until_s = time.monotonic() + SESSION_S
    while session and os.path.exists(session):
        if time.monotonic() > until_s:
            return False
        time.sleep(_POLL_S)
    return True


def _describe_end(pid: int, status: int) -> str:
    how = f"ended with status {status}"
    if status < 0:
        how = f"was ended by {signal.Signals(-status).name}"
    return f"the controller (process {pid}) {how}"


def _exit_like(status: int) -> Never:
    sys.exit(status if status >= 0 else 128 - status)


def _tell(text: str) -> None:
    print(f"mcore-rl: {text}", file=sys.stderr, flush=True)


def choose_hint() -> str:
    """Return what follows a message of a lost process: "" where it is started again anyway."""
    return f". {RESUME_HINT}" if _child is None else ""


def allow_relaunch() -> None:
    """Have the command start another child if this one is lost from now on."""
    _send({"ready": True})


def note_end() -> None:
    """Have the command end with this process, however the process ends."""
    _send({"ended": True})


def note_session(folder: str) -> None:
    """Name a folder that is removed once all processes which this one started are gone."""
    _send({"session": folder})


def hold(name: str, descriptor: int) -> None:
    """Have the command hold a file without a name for this process and those after it."""
    if _child is not None:
        _child.memory[name] = descriptor
    _send({"memory": name}, descriptor)


def drop(name: str) -> None:
    """Have the command hold the file of this name no longer."""
    if _child is not None:
        _child.memory.pop(name, None)
    _send({"memory": name})


def find_held(prefix: str) -> dict[str, int]:
    """Return by name the descriptors of files that are held and whose names begin like this."""
    memory = {} if _child is None else _child.memory
    return {name: held for name, held in memory.items() if name.startswith(prefix)}


def hold_state(content: bytes) -> None:
    """Have the command hold these bytes, in the place of those before."""
    if _child is None:
        return
    descriptor = os.memfd_create("mcore_rl_state")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        _send({"memory": _STATE}, descriptor)
    finally:
        os.close(descriptor)


def read_state() -> bytes | None:
    """Return the bytes that the process before this one had held; None: there are none."""
    for descriptor in find_held(_STATE).values():
        return Path(f"/proc/self/fd/{descriptor}").read_bytes()
    return None


def _send(message: Mapping[str, object], *descriptors: int) -> None:
    if _child is not None:
        _child.send(message, *descriptors)
