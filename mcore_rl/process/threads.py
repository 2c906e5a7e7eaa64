"""Runs two functions at the same time and returns both results."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


def at_once(first: Callable[[], T], second: Callable[[], S]) -> tuple[T, S]:
    """Return (first(), second()), with `second` in its own thread; raise what either raises.

    The thread is a daemon: if `first` raises, nobody waits for `second`.
    """
    outcome: Future[S] = Future()

    def run() -> None:
        try:
            outcome.set_result(second())
        except BaseException as error:  # outcome.result() raises it in the caller
            outcome.set_exception(error)

    threading.Thread(target=run, name="at_once", daemon=True).start()
    return first(), outcome.result()
