"""Two functions at once, each in a thread of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


def at_once(first: Callable[[], T], second: Callable[[], S]) -> tuple[T, S]:
    """(first(), second()), the latter in a thread of its own; raises what either raises.

    The thread is a daemon: where `first` raised, nobody waits for what `second` still does.
    """
    outcome: Future[S] = Future()

    def run() -> None:
        try:
            outcome.set_result(second())
        except BaseException as error:  # told to the one who waits
            outcome.set_exception(error)

    threading.Thread(target=run, name="at_once", daemon=True).start()
    return first(), outcome.result()
