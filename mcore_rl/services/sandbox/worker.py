"""The caller's side of wardens: starts them, opens boxes in them, lends them to threads, ends them.

A warden may run in bubblewrap, which another program makes of namespaces and a root of its own:

bwrap: /usr, runtimes, this package, read-only; no home, no network
  +-- warden: its own namespaces, a root without this package
        +-- boxes
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import mcore_rl
from mcore_rl.process.process_state import wait_killed
from mcore_rl.services.sandbox.cgroups import Cgroup, make_cgroup
from mcore_rl.services.sandbox.limits import MIB, Limits, SandboxError, SandboxFullError
from mcore_rl.services.sandbox.messages import Message, make_pair, receive, send, wait_readable

_NAMESPACES = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts")
_WITHOUT_FOLDER = ("/usr/bin/env", "-u", "PWD")
_USER_LIMITS = "/proc/sys/user"
"""A warden forbids further user namespaces there."""


def outer_command(paths: Sequence[str], writable: Sequence[str] = ()) -> list[str]:
    """Return the words in front of a command that runs it in bubblewrap.

    paths      folders and files that it sees, read-only
    writable   files that it may write, such as those by which a process joins a cgroup

    Raises SandboxError if this machine has no bubblewrap.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(
            "no bwrap is found, which sandbox.bubblewrap=true or --bubblewrap asks for: install the"
            " package bubblewrap on this machine, or leave the option out"
        )
    # No --die-with-parent: it would end with the thread that started it. It ends with the warden.
    words = [program, *_NAMESPACES, "--dev", "/dev", "--proc", "/proc"]
    for path in sorted(set(paths), key=len):
        words += ["--ro-bind", path, path]
    for path in writable:
        words += ["--bind", path, path]
    if os.geteuid() == 0:
        # Without rights root could not give the warden the user nobody.
        words += ["--cap-add", "ALL", "--bind", _USER_LIMITS, _USER_LIMITS]
    else:
        words.append("--unshare-user")
    # bubblewrap tells the command the folder of the host that it was started in.
    return [*words, "--chdir", "/", "--", *_WITHOUT_FOLDER]


ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/box",
    "TMPDIR": "/box",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
START_S = 60.0
"""Time for a warden to start, or to end a box: far more than it takes on a busy machine."""
_END_S = 10.0
_PACKAGE = Path(mcore_rl.__file__).parent
_CODE = (f"{_PACKAGE}/__init__.py", f"{_PACKAGE}/services/__init__.py", str(Path(__file__).parent))
"""Files that the warden itself is made of."""
_START = (
    f"import sys; kept = frozenset(sys.modules); sys.path.insert(0, {str(_PACKAGE.parent)!r});"
    "from mcore_rl.services.sandbox.warden import main; del sys.path[0];"
    "found = main(int(sys.argv[1]), int(sys.argv[2]), kept);"
    "found and found()"
)
_NEEDS = (
    "It needs Linux 5.14 or later with user namespaces for this user (sysctl"
    " user.max_user_namespaces and, on some systems, kernel.unprivileged_userns_clone or"
    " kernel.apparmor_restrict_unprivileged_userns; in a container also a seccomp profile that"
    " allows unshare and mount, and no chroot)"
)


def _refuse_old_kernel() -> None:
    """Raise SandboxError where a warden could not see its caller end, as in gVisor of 2022."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        raise SandboxError(
            f"no sandbox for programs on this machine: pidfd_open: {error}. {_NEEDS}"
        ) from None


class Worker:
    """A warden and its cgroup. Opens one box at a time; not for several threads at once.

    paths       folders and files of the machine that programs may read
    bubblewrap  start the warden in namespaces of bubblewrap, in addition to its own
    """

    def __init__(
        self, paths: Sequence[str], use_cgroups: bool = True, bubblewrap: bool = False
    ) -> None:
        _refuse_old_kernel()
        self.is_retired = False
        self._has_outer = bubblewrap
        self.cgroup: Cgroup | None = make_cgroup() if use_cgroups else None
        joins = [] if self.cgroup is None else self.cgroup.join_paths
        outer = self._outer_command(paths, joins) if bubblewrap else []
        self._control, theirs = make_pair()
        caller = os.pidfd_open(os.getpid())
        fds = (theirs.fileno(), caller)
        try:
            self._process = subprocess.Popen(
                [*outer, sys.executable, "-I", "-B", "-c", _START, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=fds,
                start_new_session=True,
                env=ENVIRONMENT,
            )
        finally:
            theirs.close()
            os.close(caller)
        try:
            self._tell({"paths": list(paths), "joins": joins})
            answer = self._hear(START_S, "to enter its namespaces")
            if "error" in answer:
                raise SandboxError(
                    f"no sandbox for programs on this machine: {answer['error']}. {_NEEDS}"
                )
        except SandboxError:
            self.close()
            raise

    def _outer_command(self, paths: Sequence[str], joins: Sequence[str]) -> list[str]:
        try:
            return outer_command([*paths, *_CODE], joins)
        except SandboxError:
            if self.cgroup is not None:
                self.cgroup.remove()
            raise

    @property
    def pid(self) -> int:
        """Return the process id of the warden, or of the bubblewrap around it."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Return whether the warden has not ended; something outside may have killed it."""
        return self._process.poll() is None

    def begin_box(self, limits: Limits) -> socket.socket:
        """Return the socket of a new box; SandboxError if the warden has ended."""
        self.limit(limits)
        call, theirs = make_pair()
        with theirs:
            options = {"files_bytes": limits.files_mib * MIB, "num_files": limits.num_files + 1}
            self._tell(options, [theirs.fileno()])
        return call

    def limit(self, limits: Limits) -> None:
        """Bound all processes of the box together, where that is possible."""
        if self.cgroup is None:
            return
        try:
            self.cgroup.set_limits(limits.memory_mib * MIB, limits.processes, limits.cpus)
        except OSError as error:
            raise SandboxError(f"the limits of a sandbox's cgroup were refused: {error}") from None

    def wait_closed(self) -> None:
        """Wait until the box is gone with all its processes; SandboxError if it stays."""
        self._hear(START_S, "to end a box")

    def retire(self) -> None:
        """End the warden, and with it every process of its box, without waiting for them."""
        self.is_retired = True
        if not self._has_outer:
            self._process.kill()
            return
        with contextlib.suppress(OSError):  # the warden ends when its socket does
            self._control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the warden and its box, and wait until they are gone."""
        self.is_retired = True
        self._control.close()
        if self._has_outer:  # it ends after the warden, and would leave it behind if it were killed
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        self._process.kill()
        wait_killed(self._process, "the warden of a sandbox")
        if self.cgroup is not None:
            self.cgroup.remove()

    def _tell(self, message: Message, fds: Sequence[int] = ()) -> None:
        try:
            send(self._control, message, fds)
        except OSError as error:
            raise SandboxError(f"the warden {self.pid} has ended: {error}") from None

    def _hear(self, timeout_s: float, what: str) -> Message:
        deadline = time.monotonic() + timeout_s
        if not wait_readable([self._control.fileno()], deadline):
            raise SandboxError(f"waited {timeout_s:g} s for the warden {self.pid} {what}")
        received = receive(self._control)
        if received is None:
            raise SandboxError(f"the warden {self.pid} ended when it had {what}")
        return received[0]


class WorkerPool:
    """At most `num_workers` workers, and at most `max_waiting` callers that wait for one.

    paths   folders and files of the machine that programs may read
    """

    def __init__(
        self,
        paths: Sequence[str],
        num_workers: int,
        max_waiting: int = 1 << 30,
        use_cgroups: bool = True,
        bubblewrap: bool = False,
    ) -> None:
        for name, value, least in (
            ("num_workers", num_workers, 1),
            ("max_waiting", max_waiting, 0),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        self._paths = paths
        self._num_workers = num_workers
        self._max_waiting = max_waiting
        self._use_cgroups = use_cgroups
        self._bubblewrap = bubblewrap
        self._idle: list[Worker] = []
        self._num_lent = 0
        self._num_waiting = 0
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def num_workers(self) -> int:
        return self._num_workers

    def counts(self) -> dict[str, int]:
        """Return how many workers are idle and lent, and how many callers wait."""
        with self._changed:
            return {
                "idle": len(self._idle),
                "busy": self._num_lent,
                "waiting": self._num_waiting,
            }

    def has_cgroups(self) -> bool:
        """Return whether the idle workers have cgroups; False if there are none."""
        with self._changed:
            return bool(self._idle) and all(worker.cgroup is not None for worker in self._idle)

    def warm_up(self) -> None:
        """Start all workers; SandboxError if this machine allows no sandbox."""
        for _ in range(self._num_workers - len(self._idle) - self._num_lent):
            worker = self._start()
            with self._changed:
                self._idle.append(worker)

    @contextmanager
    def lend(self, timeout_s: float = 600.0) -> Iterator[Worker]:
        """Yield a worker for this caller alone; it is replaced if the block raises.

        Raises SandboxFullError if the queue is full, and SandboxError if none becomes free in time.
        """
        worker = self._take(time.monotonic() + timeout_s, timeout_s)
        try:
            if worker is not None and not worker.is_alive:
                worker.close()
                worker = None
            if worker is None:
                worker = self._start()
            yield worker
        except BaseException:
            self._give_back(None)
            if worker is not None:
                worker.close()
            raise
        self._give_back(worker)

    def close(self) -> None:
        """End all workers that are not lent; those that are end when they come back."""
        with self._changed:
            self._is_closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for worker in idle:
            worker.close()

    def _start(self) -> Worker:
        return Worker(self._paths, self._use_cgroups, self._bubblewrap)

    def _take(self, deadline: float, timeout_s: float) -> Worker | None:
        """Return an idle worker, or None if the caller may start one."""
        with self._changed:
            if self._is_busy() and self._num_waiting >= self._max_waiting:
                raise SandboxFullError(
                    f"all {self._num_workers} workers of the sandbox are busy and"
                    f" {self._num_waiting} callers wait: try again later, or give it more workers"
                )
            self._num_waiting += 1
            try:
                while self._is_busy() and not self._is_closed:
                    if not self._changed.wait(deadline - time.monotonic()):
                        raise SandboxError(
                            f"waited {timeout_s:g} s for one of {self._num_workers} workers of the"
                            " sandbox to become free"
                        )
            finally:
                self._num_waiting -= 1
            if self._is_closed:
                raise SandboxError("the sandbox was closed")
            self._num_lent += 1
            return self._idle.pop() if self._idle else None

    def _is_busy(self) -> bool:
        return not self._idle and self._num_lent >= self._num_workers

    def _give_back(self, worker: Worker | None) -> None:
        with self._changed:
            self._num_lent -= 1
            is_kept = worker is not None and not (self._is_closed or worker.is_retired)
            if worker is not None and is_kept:
                self._idle.append(worker)
            self._changed.notify()
        if worker is not None and not is_kept:
            worker.close()
