"""Handles the signals of a run: stop requests, and signals during forks and destructors.

By SIGUSR1, and by SIGTERM while a loop runs, a scheduler asks a run to save and end. A loop asks
`is_stop_requested` after each step, saves, and raises StoppedEarlyError. The command then exits
with EXIT_STATUS; the same command continues the run.

    signal ... step ends: save, end                  within half of the grace
    signal ....... | OverdueStopError if nothing trains: the step before is saved
    SIGTERM .............. | TerminatedError         after the grace, and at a second SIGTERM

Python drops exceptions of signal handlers that run in callbacks of os.fork, and skips the rest of
the callback: logging's lock stays taken, and the request to stop is lost. So a signal waits:

    os.fork: before-callbacks | fork | after-callbacks      signal here --> noted --> handled after
             (logging takes its lock)  (gives it back)
"""

import _thread
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

Handler = Callable[[int, FrameType | None], object]
_AGAIN_S = 0.01
_depth = 0
"""How many of this module's after-callbacks a fork of the main thread still has to run, plus the
blocks of `hold_signals` that the thread is in."""


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


@contextmanager
def hold_signals() -> Iterator[None]:
    """Have signals that come in the block of the main thread handled right after it.

    This holds for handlers that `handle_outside_forks` installed.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def keep_interrupts() -> None:
    """Repeat a Ctrl-C or SIGTERM that came in a destructor, whose exceptions Python drops."""

    def raise_again(dropped: "sys.UnraisableHookArgs") -> None:
        # A timer does so, because Python would drop an exception of this hook as well.
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            threading.Timer(0.05, _thread.interrupt_main).start()
        elif isinstance(dropped.exc_value, TerminatedError) or (
            getattr(dropped.exc_value, "code", None) == 128 + signal.SIGTERM
        ):
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            sys.__unraisablehook__(dropped)

    sys.unraisablehook = raise_again


SIGNAL = signal.SIGUSR1
EXIT_STATUS = 75
"""EX_TEMPFAIL of sysexits.h: the run was saved; the same command continues it."""


class TerminatedError(SystemExit):
    """SIGTERM came. The run ends once a checkpoint that was begun is complete.

    Its status is 143, or EXIT_STATUS if the run had been asked to stop before.
    """

    def __init__(self, status: int = 128 + signal.SIGTERM) -> None:
        super().__init__(status)


class StoppedEarlyError(Exception):
    """A run was asked to stop: it saved and ended before its last step."""


class OverdueStopError(BaseException):
    """Half of the grace after a request to stop is over, where nothing would be lost."""

    def __init__(self, told: str = "half of run.grace_s is over since the request to stop") -> None:
        super().__init__(told)


@dataclass
class _Stop:
    """The requests that this process got.

    grace_s      of the loop that runs; 0: none runs, or a request waits for the end of its step
    overdue_at   when half of the grace is over, by time.monotonic
    """

    is_requested: bool = False
    is_told: bool = False
    is_terminated: bool = False
    may_interrupt: bool = False
    grace_s: float = 0.0
    overdue_at: float = math.inf
    timers: list[threading.Timer] = field(default_factory=list)

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() >= self.overdue_at

    def request(self) -> None:
        self.is_requested = True
        if self.grace_s and math.isinf(self.overdue_at):
            self.overdue_at = time.monotonic() + self.grace_s / 2
            self.start_timer(self.grace_s / 2, SIGNAL)

    def start_timer(self, seconds: float, number: signal.Signals) -> None:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()
        self.timers.append(timer)


_stop = _Stop()


def watch_for_stop_requests() -> None:
    """Have SIGUSR1 request a stop instead of ending the process. Only for the main thread.

    A SIGUSR1 that came while it was blocked counts, too.
    """
    global _stop
    _stop = _Stop()
    signal.signal(SIGNAL, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})


def is_stop_requested() -> bool:
    return _stop.is_requested


@contextmanager
def handle_stops(grace_s: float) -> Iterator[None]:
    """Have SIGTERM request a stop as well within the block, and bound what follows a request.

    After half of `grace_s`, blocks of `allow_interruption` are interrupted; at its end SIGTERM ends
    the process. 0: SIGTERM ends it at once. Only for the main thread. Raises StoppedEarlyError in
    the place of an OverdueStopError that nobody caught.
    """
    _stop.grace_s = grace_s
    if _stop.is_requested:
        _stop.request()
    try:
        yield
    except OverdueStopError:
        raise StoppedEarlyError(
            "stopped on request within a step; the same command continues from its newest"
            " checkpoint"
        ) from None
    finally:
        _stop.grace_s = 0.0
        _stop.overdue_at = math.inf
        while _stop.timers:
            _stop.timers.pop().cancel()


@contextmanager
def allow_interruption() -> Iterator[None]:
    """Raise OverdueStopError in the block if a request to stop is, or becomes, overdue."""
    _stop.may_interrupt = True
    try:
        if _stop.is_overdue:
            raise OverdueStopError
        yield
    finally:
        _stop.may_interrupt = False


@contextmanager
def forbid_interruption() -> Iterator[None]:
    """Have a block within one of `allow_interruption` end before OverdueStopError is raised.

    An error of the block itself comes before. Only the main thread is ever interrupted.
    """
    if not _stop.may_interrupt or threading.current_thread() is not threading.main_thread():
        yield
        return
    _stop.may_interrupt = False
    try:
        yield
    finally:
        _stop.may_interrupt = True
    if _stop.is_overdue:
        raise OverdueStopError


def terminate(signum: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: request a stop of the loop that runs, or raise TerminatedError."""
    if _stop.grace_s and not _stop.is_terminated:
        _stop.is_terminated = True
        _stop.start_timer(_stop.grace_s, signal.SIGTERM)
        _stop.request()
        return
    raise TerminatedError(EXIT_STATUS) if _stop.is_terminated else TerminatedError()


def _note(signum: int, frame: FrameType | None) -> None:
    """Handle SIGUSR1, also that of the timer which says that half of the grace is over."""
    if not _stop.is_requested:
        _stop.request()
    elif _stop.is_overdue:
        if not _stop.may_interrupt:
            _tell_why_not()
            return
        _stop.may_interrupt = False
        raise OverdueStopError


def _tell_why_not() -> None:
    """Say once on stderr why a request that is overdue does not end the run yet."""
    if _stop.is_told:
        return
    _stop.is_told = True
    told = (
        "mcore-rl: half of run.grace_s is over since the request to stop, in a part of the step"
        " that is not interrupted (training, a weight sync, a save, a recovery): the run ends when"
        " its step, or the one before, is saved\n"
    )
    # A signal handler must not write to a buffered stream that it may have interrupted.
    with contextlib.suppress(OSError):
        os.write(2, told.encode())
