"""The process of an SGLang server: forked from one that has imported SGLang, or started anew.

The kernel, or the process that forked it, kills it together with the one that started it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import BinaryIO

from mcore_rl.process.fork_request import ForkedProcess, fork_tied
from mcore_rl.process.server_keys import KEYS_FD, ServerKeys, pass_to_child
from mcore_rl.rollout.engine_spec import UNCOMPILED

FORKS = "MCORE_RL_ENGINE_FORKS"
"""The variable that names the socket of the process that forks servers (cpu/engine_forks.py)."""
SERVER = ["-P", "-m", "mcore_rl.rollout.server"]


class ServerProcess:
    """Runs mcore_rl.rollout.server with `arguments`, in a process group of its own.

    log   file of its output
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        keys: ServerKeys | None,
        log: BinaryIO,
    ) -> None:
        self._exit_status: int | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        with pass_to_child(keys) as keys_fd:
            fork = _fork(arguments, environment, keys_fd, log)
            if fork is None:
                self._start(arguments, environment, keys_fd, log)
            else:
                self.pid = fork.pid
                self._waiting = threading.Thread(target=self._wait, args=(fork,), daemon=True)
                self._waiting.start()

    def _start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        keys_fd: int | None,
        log: BinaryIO,
    ) -> None:
        """Start it in a separate thread, which waits for its end: the kernel kills the child
        together with the thread that started it (see process/tied.py).
        """
        command = [sys.executable, *SERVER, "--parent-pid", str(os.getpid())]
        if keys_fd is not None:
            command += [KEYS_FD, str(keys_fd)]
        started: Future[subprocess.Popen[bytes]] = Future()

        def start_and_wait() -> None:
            try:
                process = subprocess.Popen(
                    [*command, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=() if keys_fd is None else (keys_fd,),
                    env=environment,
                )
            except OSError as error:
                started.set_exception(error)
                return
            started.set_result(process)
            process.wait()

        self._waiting = threading.Thread(target=start_and_wait, daemon=True)
        self._waiting.start()
        self._popen = started.result()
        self.pid = self._popen.pid

    def _wait(self, fork: ForkedProcess) -> None:
        self._exit_status = fork.wait()

    @property
    def exit_status(self) -> int | None:
        """The server's exit code, or minus the signal that killed it; None while it runs.

        Of a child it asks the kernel, since the thread that waits may not have woken yet.
        """
        if self._popen is None:
            return self._exit_status
        if self._popen.returncode is not None:
            return self._popen.returncode
        with contextlib.suppress(ChildProcessError):  # the waiting thread has reaped it already
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self._waiting.join()
        return self._popen.returncode

    def kill(self) -> None:
        """Kill its process group, if it is still there, without waiting."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def join(self, timeout_s: float) -> None:
        """Wait until the end has been noticed."""
        self._waiting.join(timeout_s)


def can_be_forked(arguments: Sequence[str]) -> bool:
    """Return whether a server with these arguments has imported what any other has."""
    return UNCOMPILED not in arguments


def _fork(
    arguments: Sequence[str], environment: Mapping[str, str], keys_fd: int | None, log: BinaryIO
) -> ForkedProcess | None:
    """Return the server's process if one that has imported SGLang forks it, otherwise None."""
    path = os.environ.get(FORKS)
    if path is None or not can_be_forked(arguments):
        return None
    with open(os.devnull, "rb") as nothing:
        streams = [nothing.fileno(), log.fileno(), log.fileno()]
        others = [] if keys_fd is None else [keys_fd]
        return fork_tied(path, [*SERVER, *arguments], environment, streams, others)
