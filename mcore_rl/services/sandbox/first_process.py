"""The first process of a box: runs steps as its caller asks, and hands files in and out.

It is process 1 of a process namespace, so the kernel ends every process in it when this one ends,
and a program can neither signal it nor see it. It ends when its caller or its warden does. A step
is a fork that becomes the program: limits, no rights, filtered system calls.
"""

import atexit
import builtins
import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mcore_rl.services.sandbox import isolation, seccomp
from mcore_rl.services.sandbox.box_files import pack, unpack
from mcore_rl.services.sandbox.isolation import BOX, INNER_ID, mount_box
from mcore_rl.services.sandbox.messages import Message, receive, send, wait_readable

_MOST_DESCRIPTORS = 1 << 20
_SPARE_CPU_S = 1
"""Seconds from SIGXCPU, whose status says why a program ended, to SIGKILL for one that stays."""


def enter_cgroups(joins: Sequence[int]) -> None:
    """Move this process into the cgroups whose lists of tasks are open as `joins`."""
    for join in joins:
        os.pwrite(join, b"0", 0)


def place_descriptors(fds: Sequence[int]) -> None:
    """Make fds[0] the descriptor 0, and so on, and close all others."""
    high = list(fds)
    while any(fd < len(fds) for fd in high):
        high = [os.dup(fd) if fd < len(fds) else fd for fd in high]
    for target, fd in enumerate(high):
        os.dup2(fd, target)
    os.closerange(len(fds), _MOST_DESCRIPTORS)


def become_program(step: dict[str, Any], call_filter: bytes) -> None:
    """Take up the limits of `step` for good, and execute its command, if it has one.

    Raises OSError if the machine refuses, and ValueError if its own limit is lower.
    """
    os.setsid()
    _reset_signals(bool(step["command"]))
    isolation.drop_bounding_rights()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(INNER_ID, INNER_ID, INNER_ID)
        os.setresuid(INNER_ID, INNER_ID, INNER_ID)
    _set_limits(step["limits"])
    isolation.drop_rights()
    seccomp.install(call_filter)
    os.umask(0o022)
    if step["command"]:
        os.execve(step["command"][0], step["command"], {**os.environ, **step["environment"]})


def _reset_signals(is_command: bool) -> None:
    """Set the signals that the sandbox changed as a new process finds them."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # A Python program finds SIGPIPE ignored, as the interpreter does that at its start.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL if is_command else signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        if hard != resource.RLIM_INFINITY and value > hard:
            raise ValueError(
                f"{name}={value} is above the hard limit {hard} of this machine: raise it"
                " (ulimit -H, limits.conf, the container), or ask for less"
            )
        most = value if name != "RLIMIT_CPU" else value + _SPARE_CPU_S
        resource.setrlimit(number, (value, most if hard < 0 else min(most, hard)))


def run_python(path: str, kept: frozenset[str]) -> NoReturn:
    """Run a program in this interpreter, as `python <path>` would, and end with its status.

    Of the modules that are loaded it finds those named in `kept`; others are imported anew.
    """
    for name in set(sys.modules) - kept:
        del sys.modules[name]
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main
    sys.argv = [path]
    sys.path.insert(0, os.path.dirname(path))
    status = 0
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except SystemExit as stop:
        status = _status_of(stop)
    except BaseException as error:  # the program's, which the caller reads in its output
        _report(error)
        status = 1
    os._exit(_finish(main, kept, status))


def _status_of(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _report(error: BaseException) -> None:
    """Print the traceback as the interpreter does, without the frames of the sandbox."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _finish(main: types.ModuleType, kept: frozenset[str], status: int) -> int:
    """Do what the interpreter does at its end, but for tearing itself down.

    That would copy every page that it shares with its siblings. Returns the exit status.
    """
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    main.__dict__.clear()
    for name in set(sys.modules) - kept:
        if (getattr(sys.modules[name], "__file__", "") or "").startswith(f"{BOX}/"):
            sys.modules[name].__dict__.clear()
    gc.collect()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # the interpreter's own status for output that is lost
        return 120
    return status


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
        isolation.die_with_parent()
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
            place_descriptors([*fds, report])
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
