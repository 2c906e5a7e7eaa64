"""The first process of a box: runs steps as its caller asks, and hands files in and out.

It is process 1 of a process namespace, so the kernel ends every process in it when this one ends,
and a program can neither signal it nor see it. It ends when its caller or its warden does.
"""

import contextlib
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence

from mcore_rl.services.sandbox import linux
from mcore_rl.services.sandbox.box_files import pack, unpack
from mcore_rl.services.sandbox.isolation import BOX, INNER_ID, mount_box
from mcore_rl.services.sandbox.messages import Message, receive, send, wait_readable
from mcore_rl.services.sandbox.step_process import become_program, enter_cgroups, place, run_python

Program = Callable[[], None]


class FirstProcess:
    """Serves the messages of one box; see messages in worker.py for the other side.

    call     socket of the caller
    alive    the read end of a pipe whose write end only the warden holds
    joins    open files that take a process into the box's cgroups
    kept     names of the modules that a program finds loaded
    """

    def __init__(
        self,
        call: socket.socket,
        alive: int,
        joins: Sequence[int],
        call_filter: bytes,
        kept: frozenset[str],
    ) -> None:
        self._call = call
        self._alive = alive
        self._joins = joins
        self._filter = call_filter
        self._kept = kept
        self._owner = INNER_ID if os.geteuid() == 0 else None
        self._pid = 0
        self._deadline: float | None = None
        self._is_late = False
        self._began = 0.0
        self._used_s = 0.0

    def serve(self, options: Message) -> Program | None:
        """Answer until the caller hangs up; return the program to run in a process forked here."""
        linux.die_with_parent()
        if select.select([self._alive], [], [], 0)[0]:  # end of file: the warden is gone
            os._exit(1)
        child_ended = self._watch_children()
        try:
            mount_box(options["files_bytes"], options["num_files"])
        except OSError as error:
            send(self._call, {"error": str(error)})
            return None
        while True:
            ready = wait_readable([self._call.fileno(), child_ended], self._deadline)
            self._reap(child_ended if child_ended in ready else None)
            if self._pid and self._deadline and time.monotonic() >= self._deadline:
                self._is_late = True
                self._kill()
            if self._call.fileno() in ready:
                received = receive(self._call)
                if received is None:
                    return None
                program = self._handle(*received)
                if program is not None:
                    return program

    def _watch_children(self) -> int:
        """Return a descriptor that is readable after a child has ended."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)  # a program of the same user could send them
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        return reader

    def _handle(self, message: Message, fds: list[int]) -> Program | None:
        """Carry out a message and answer it; a step is answered when it ends."""
        if message["op"] == "run":
            program = self._run(message, fds)
            if program is not None:
                return program
        elif message["op"] == "kill":
            self._kill()
        elif message["op"] == "interrupt":
            if self._pid:
                os.killpg(self._pid, signal.SIGINT)
        else:
            send(self._call, self._move_files(message, fds))
        for fd in fds:
            os.close(fd)
        return None

    def _move_files(self, message: Message, fds: list[int]) -> Message:
        """Take files in ("put") or hand them out ("get") through the file fds[0]."""
        with os.fdopen(os.dup(fds[0]), "r+b") as stream:
            try:
                if message["op"] == "put":
                    unpack(BOX, stream, self._owner)
                    return {"refused": ""}
                return {"refused": pack(BOX, message["paths"], message["max_bytes"], stream)}
            except OSError as error:
                return {"refused": f"{error.strerror}: {error.filename}"}

    def _run(self, step: Message, fds: list[int]) -> Program | None:
        """Fork a step. In the child, return its program, or execute its command."""
        assert not self._pid, "a step began before the last one ended"
        self._began = time.monotonic()
        self._used_s = _children_cpu_s()
        self._deadline = self._began + step["wall_s"]
        self._is_late = False
        failed, report = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(failed)
            return self._start_program(step, fds, report)
        os.close(report)
        self._failed = failed
        return None

    def _start_program(self, step: Message, fds: list[int], report: int) -> Program:
        """Become the program; `report` tells why that failed, and closes when it did not."""
        try:
            enter_cgroups(self._joins)
            place([*fds, report])
            report = len(fds)
            os.set_inheritable(report, False)
            become_program(step, self._filter)
        except (OSError, ValueError) as error:
            os.write(report, str(error).encode())
            os._exit(1)
        os.close(report)
        program, kept = step["program"], self._kept
        return lambda: run_python(program, kept)

    def _reap(self, child_ended: int | None) -> None:
        if child_ended is not None:
            os.read(child_ended, 4096)
        while True:
            try:
                pid, waited, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._finish(waited, used)

    def _finish(self, waited: int, used: resource.struct_rusage) -> None:
        """End all that the step left behind, and answer with how it ended."""
        wall_s = time.monotonic() - self._began
        self._kill()
        while True:
            try:
                _, _, other = os.wait4(-1, 0)
            except ChildProcessError:
                break
            if other.ru_maxrss > used.ru_maxrss:
                used = other
        self._pid = 0
        self._deadline = None
        with os.fdopen(self._failed, "rb") as failed:
            error = failed.read().decode(errors="replace")
        code = os.waitstatus_to_exitcode(waited)
        answer: Message = {
            "status": code if code >= 0 else 128 - code,
            "is_late": self._is_late,
            "wall_s": wall_s,
            "cpu_s": _children_cpu_s() - self._used_s,
            "memory_bytes": used.ru_maxrss << 10,
        }
        send(self._call, answer | ({"error": error} if error else {}))

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
