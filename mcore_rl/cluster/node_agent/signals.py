"""Counts the signals by which a scheduler asks a job to stop."""

import signal
from types import FrameType

from mcore_rl.process.signals import SIGNAL


class StopSignals:
    """From its making on SIGUSR1, SIGTERM and SIGINT are counted. Only for the main thread.

    The first asks the run to save and to end, a second one to end at once.
    """

    def __init__(self) -> None:
        self.count = 0
        for signum in (SIGNAL, signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
