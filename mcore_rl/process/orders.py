"""Passes orders to a running command through files in its run folder, and its answers back.

    orders/open           while the command takes orders
    orders/<id>.order     JSON; the command removes it as it takes it
    orders/<id>.answer    JSON; whoever gave the order removes it

Whoever may write into the run folder may give orders; nobody else is asked.
"""

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.process.disk import write_whole

FOLDER = "orders"
TAKEN_S = 20.0
"""How long a command may take to take an order."""
_POLL_S = 0.2


@dataclass(frozen=True)
class Order:
    """Asks a command to do something; `words` say what."""

    id: str
    words: Mapping[str, Any]


class OrderDesk:
    """Where a command takes orders and answers them."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER

    @contextmanager
    def open(self) -> Iterator[None]:
        """Take orders for the block; drop what an earlier command left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            path.unlink(missing_ok=True)
        write_whole(self._folder / "open", "")
        try:
            yield
        finally:
            (self._folder / "open").unlink(missing_ok=True)

    def take(self) -> list[Order]:
        """Return the orders that have come since the last call."""
        orders = []
        for path in sorted(self._folder.glob("*.order")):
            text = path.read_text()
            path.unlink()
            with contextlib.suppress(ValueError):  # not written by give_order
                words = json.loads(text)
                if isinstance(words, dict):
                    orders.append(Order(path.stem, words))
        return orders

    def answer(self, order: Order, text: str, *, is_done: bool) -> None:
        """Say how an order ended; `is_done` False: it is refused, or failed."""
        said = json.dumps({"text": text, "is_done": is_done})
        write_whole(self._folder / f"{order.id}.answer", said)


def give_order(run_dir: Path, words: Mapping[str, Any], timeout_s: float) -> str:
    """Return what the command that runs in a folder answers to an order.

    Raises ValueError if it refuses the order or takes none, and RuntimeError if it does not answer.
    """
    folder = run_dir / FOLDER
    is_open = (folder / "open").exists
    if not is_open():
        raise ValueError(f"no command that takes orders runs in {run_dir}")
    name = uuid.uuid4().hex
    order, answer = folder / f"{name}.order", folder / f"{name}.answer"
    write_whole(order, json.dumps(dict(words)))
    if not _wait(lambda: not order.exists(), TAKEN_S):
        order.unlink(missing_ok=True)
        raise RuntimeError(
            f"the command that runs in {run_dir} took no order for {TAKEN_S:g} s: it was killed, or"
            " hangs (docs/debugging.md)"
        )
    if not _wait(lambda: answer.exists() or not is_open(), timeout_s):
        raise RuntimeError(
            f"the command that runs in {run_dir} took the order, and did not say how it ended for"
            f" {timeout_s:g} s: see {run_dir / 'logs' / 'controller.log'}"
        )
    if not answer.exists():
        raise RuntimeError(
            f"the command that ran in {run_dir} ended before the order was carried out"
        )
    said = json.loads(answer.read_text())
    answer.unlink()
    if not said["is_done"]:
        raise ValueError(said["text"])
    return said["text"]


def _wait(is_so: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether something is so within `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > until_s:
            return False
        time.sleep(_POLL_S)
    return True
