"""Notes SIGUSR1, by which a scheduler asks a run to save and to make room.

A loop asks `stop_requested` after each step, saves, and raises StoppedEarly. The command then ends
with EXIT_STATUS, and the same command goes on from there.

Keeps what handlers of signals raise from being dropped, in forks and in destructors.

    os.fork: before-callbacks | fork | after-callbacks      signal here --> noted --> handled after
             (logging takes its lock)  (gives it back)

Python drops what a callback raises, and the rest of that callback does not run: logging's lock
stays taken, and the stop that was asked for is forgotten.
"""

import _thread
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], object]
_AGAIN_S = 0.01
_depth = 0
"""Callbacks of this module that the main thread's fork has still to run."""


def handle_outside_forks(number: signal.Signals, handler: Handler) -> None:
    """Have `handler` answer to a signal; one that comes during a fork is answered right after it.

    Only for the main thread. The callbacks of modules that were imported before are covered, so
    call this again once what registers more of them has been imported.
    """

    def handle(signum: int, frame: FrameType | None) -> None:
        if _depth:
            again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signum))
            again.daemon = True
            _waiting.append(again)
        else:
            handler(signum, frame)

    # The callback that is registered last is the first before a fork, and the last after it.
    os.register_at_fork(before=_enter, after_in_parent=_leave, after_in_child=_forget)
    signal.signal(number, handle)


_waiting: list[threading.Timer] = []


def _enter() -> None:
    global _depth
    if threading.current_thread() is threading.main_thread():
        _depth += 1


def _leave() -> None:
    global _depth
    if threading.current_thread() is threading.main_thread():
        _depth -= 1
        while not _depth and _waiting:
            _waiting.pop().start()


def _forget() -> None:
    """The signal was for the parent; a child of another thread's fork was never inside."""
    global _depth
    _depth = 0
    _waiting.clear()


def keep_interrupts() -> None:
    """Raise a Ctrl-C again, or a SIGTERM, if it hit a destructor, whose exceptions Python drops."""

    def raise_again(dropped: "sys.UnraisableHookArgs") -> None:
        # Not from here: an exception of this hook would be dropped as well.
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            threading.Timer(0.05, _thread.interrupt_main).start()
        elif getattr(dropped.exc_value, "code", None) == 128 + signal.SIGTERM:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            sys.__unraisablehook__(dropped)

    sys.unraisablehook = raise_again


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
