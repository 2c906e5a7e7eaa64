"""Runs the job's command on its first node, and hands on what it is asked to do."""

import signal
import subprocess
from collections.abc import Sequence

from mcore_rl.process.process_state import wait_killed
from mcore_rl.process.safe_path import safe_module
from mcore_rl.process.signals import SIGNAL


class RunCommand:
    """`mcore-rl <arguments>` as a process in a session of its own."""

    def __init__(self, arguments: Sequence[str]) -> None:
        # Until the command handles the signal, one that comes is kept and not its end.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
        try:
            self._process = subprocess.Popen(
                [*safe_module("mcore_rl.cli"), *arguments],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def ask_to_save(self) -> None:
        self._process.send_signal(SIGNAL)

    def end(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
        wait_killed(self._process, "the node's command")

    def status(self) -> int | None:
        """Return the exit status as a shell gives it, or None while the command runs."""
        status = self._process.poll()
        return 128 - status if status is not None and status < 0 else status
