"""Tells who waits at the console what a run is doing; without `tell_progress` nothing is printed.

tell_stage --> "start-up: trainer 14.2s"       a line when a stage of the start-up is over
say        --> "saving step 4"                 a line at once
say_once   --> "saved step 4"                  a line as soon as something is so
a thread   --> "step 3: rollout for 1:00 | 96 of 512 samples"    while nothing else is printed

Lines in a file or a pipe begin with the time of day.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

POLL_S = 1.0
QUIET_S = 60.0
"""In a file or a pipe, a run that waits prints a line at least this often."""
TERMINAL_QUIET_S = 10.0
"""The same on a terminal, where somebody waits for the panel."""
CLOSE_S = 5.0
"""A console that takes no output any more does not hold up the end of a run for longer."""


@dataclass(eq=False)
class RunStage:
    """A stage under way; `count` tells how far it is, if anybody counts."""

    name: str
    began_s: float
    count: Callable[[], str] | None = None

    def describe(self) -> str:
        seconds = time.monotonic() - self.began_s
        counted = self.count() if self.count else ""
        return f"{self.name} for {format_clock(seconds)}" + (f" | {counted}" if counted else "")


class Progress:
    """Prints to stdout as it is at the time: a panel on a terminal moves below such lines."""

    def __init__(self, quiet_s: float | None, poll_s: float) -> None:
        """`quiet_s`: seconds without a line after which the stage under way is printed; None: as
        fits a file or a terminal.
        """
        self._is_terminal = sys.stdout.isatty()
        self.refresh: Callable[[str], None] | None = None
        """Shows the stage under way, in place of lines, where a terminal has a panel."""
        usual_s = TERMINAL_QUIET_S if self._is_terminal else QUIET_S
        self._quiet_s = usual_s if quiet_s is None else quiet_s
        self._poll_s = poll_s
        self._lock = threading.RLock()
        self._said_s = time.monotonic()
        self._expected: list[tuple[Callable[[], bool], str]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """Print a line."""
        with self._lock:
            print(stamp(text, self._is_terminal) + "\n", end="", flush=True)
            self.note_printed()

    def note_printed(self) -> None:
        self._said_s = time.monotonic()

    def say_once(self, is_so: Callable[[], bool], text: str) -> None:
        with self._lock:
            self._expected.append((is_so, text))

    def look(self) -> None:
        """Print what has come true of `say_once`."""
        with self._lock:
            true = [entry for entry in self._expected if entry[0]()]
            self._expected = [entry for entry in self._expected if entry not in true]
            for _, text in true:
                self.say(text)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(CLOSE_S)
        self.look()

    def _watch(self) -> None:
        with contextlib.suppress(OSError):  # nobody reads stdout any more
            while not self._is_over.wait(self._poll_s):
                self.look()
                self._tell_stage()

    def _tell_stage(self) -> None:
        for stage in _stages[-1:]:
            if self.refresh is not None:
                self.refresh(stage.describe())
            elif time.monotonic() - self._said_s >= self._quiet_s:
                self.say(stage.describe())


_stages: list[RunStage] = []
"""Stages under way, the innermost last."""
_told: list[Progress] = []
"""The one that prints, if there is one."""


@contextmanager
def tell_progress(
    is_on: bool = True, quiet_s: float | None = None, poll_s: float = POLL_S
) -> Iterator[None]:
    """Print what the functions of this module are told within the block, if `is_on`."""
    if not is_on:
        yield
        return
    progress = Progress(quiet_s, poll_s)
    _told.append(progress)
    try:
        yield
    finally:
        _told.remove(progress)
        progress.close()


def say(text: str) -> None:
    """Print a line on the console, if there is one."""
    if _told:
        _told[-1].say(text)


def say_once(is_so: Callable[[], bool], text: str) -> None:
    """Print `text` once `is_so` returns True, which a thread asks each second, and `look`."""
    if _told:
        _told[-1].say_once(is_so, text)


def look() -> None:
    """Print what has come true of `say_once` by now."""
    if _told:
        _told[-1].look()


def show_in_panel(refresh: Callable[[str], None] | None) -> None:
    """Give the stage under way to `refresh` each second, in place of lines; None: lines again."""
    if _told:
        _told[-1].refresh = refresh


def note_printed() -> None:
    """Note that a line was printed elsewhere, so that the next one may wait."""
    if _told:
        _told[-1].note_printed()


@contextmanager
def tell_stage(name: str, *, is_told: bool = False) -> Iterator[None]:
    """Let the console know the stage; `is_told`: print its seconds once it is over."""
    stage = RunStage(name, time.monotonic())
    _stages.append(stage)
    try:
        yield
        if is_told:
            say(f"{name} {time.monotonic() - stage.began_s:.1f}s")
    finally:
        _stages.remove(stage)


@contextmanager
def count_in_stage(count: Callable[[], str]) -> Iterator[None]:
    """Have `count` tell how far the innermost stage is; another thread calls it."""
    if not _stages:
        yield
        return
    stage = _stages[-1]
    stage.count = count
    try:
        yield
    finally:
        stage.count = None


def stamp(text: str, is_terminal: bool) -> str:
    """Return a line of the console; except on a terminal, it begins with the time of day."""
    return text if is_terminal else f"{time.strftime('%H:%M:%S')} {text}"


def format_clock(seconds: float) -> str:
    """Return minutes and seconds, as in 1:05, from an hour on as in 1:00:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
