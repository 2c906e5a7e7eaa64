"""Handles the signals of a run: stop requests, and signals during forks and destructors.

By SIGUSR1 a scheduler asks a run to save and end. A loop asks `is_stop_requested` after
each step, saves, and raises StoppedEarlyError. The command then exits with EXIT_STATUS; the same
command continues the run.

Python drops exceptions of signal handlers that run in callbacks of os.fork, and skips the rest of
the callback: logging's lock stays taken, and the request to stop is lost. So a signal waits:

    os.fork: before-callbacks | fork | after-callbacks      signal here --> noted --> handled after
             (logging takes its lock)  (gives it back)
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
"""How many of this module's after-callbacks a fork of the main thread still has to run."""


def handle_outside_forks(number: signal.Signals, handler: Handler) -> None:
    """Install `handler` for a signal; a signal that comes during a fork is handled right after it.

    Call this from the main thread, and again after importing modules that register callbacks of
    os.fork: only callbacks that were registered before are covered.
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
    """Reset the child: the signal was for the parent."""
    global _depth
    _depth = 0
    _waiting.clear()


def keep_interrupts() -> None:
    """Repeat a Ctrl-C or SIGTERM that came in a destructor, whose exceptions Python drops."""

    def raise_again(dropped: "sys.UnraisableHookArgs") -> None:
        # A timer does so, because Python would drop an exception of this hook as well.
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            threading.Timer(0.05, _thread.interrupt_main).start()
        elif getattr(dropped.exc_value, "code", None) == 128 + signal.SIGTERM:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            sys.__unraisablehook__(dropped)

    sys.unraisablehook = raise_again


SIGNAL = signal.SIGUSR1
EXIT_STATUS = 75
"""EX_TEMPFAIL of sysexits.h: the run was saved; the same command continues it."""

_requested = False


class TerminatedError(SystemExit):
    """SIGTERM came. The run ends with status 143, once a checkpoint that was begun is complete."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class StoppedEarlyError(Exception):
    """A run was asked to stop: it saved and ended before its last step."""


def watch_for_stop_requests() -> None:
    """Have SIGUSR1 request a stop instead of ending the process. Only for the main thread.

    A SIGUSR1 that came while it was blocked counts, too.
    """
    global _requested
    _requested = False
    signal.signal(SIGNAL, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})


def is_stop_requested() -> bool:
    return _requested


def _note(signum: int, frame: FrameType | None) -> None:
    global _requested
    _requested = True
