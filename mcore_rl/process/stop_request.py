"""Notes SIGUSR1, by which a scheduler asks a run to save and to make room.

A loop asks `stop_requested` after each step, saves, and raises StoppedEarly. The command then ends
with EXIT_STATUS, and the same command goes on from there.
"""

import signal
from types import FrameType

SIGNAL = signal.SIGUSR1
EXIT_STATUS = 75
"""EX_TEMPFAIL of sysexits.h: saved, to be continued by the same command."""

_requested = False


class StoppedEarly(Exception):
    """A run saved and ended before its last step because it was asked to."""


def watch_for_stop_requests() -> None:
    """From now on SIGUSR1 is noted instead of ending the process. Only for the main thread.

    One that came while the signal was blocked is noted as well.
    """
    global _requested
    _requested = False
    signal.signal(SIGNAL, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})


def stop_requested() -> bool:
    return _requested


def _note(signum: int, frame: FrameType | None) -> None:
    global _requested
    _requested = True
