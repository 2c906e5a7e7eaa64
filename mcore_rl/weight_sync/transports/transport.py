"""Defines a transport: bytes travel between ranks by the three verbs send, recv and run.

Each link to an engine has its own transport. `send` and `recv` start a message at once; `run` waits
for started messages. A message's memory belongs to the transport until its wait is over. Received
bytes are valid until the next `run`.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

FAILURE_POLL_S = 0.5
"""How often a wait checks whether the link has failed elsewhere."""


class TransferError(RuntimeError):
    """Bytes did not arrive, or arrived wrong; the message names who waited for whom, for what.

    `peer_lost` is set if another rank went away or kept this one waiting; its own report says more.
    """

    def __init__(self, message: str, *, peer_lost: bool = False) -> None:
        super().__init__(message)
        self.peer_lost = peer_lost


def wait_until(
    is_done: Callable[[float], bool], deadline_s: float, failure: Callable[[], str | None]
) -> str | None:
    """Return None when `is_done(timeout)` succeeds, otherwise the reason it did not.

    `is_done` may block for at most the number of seconds it is given. `deadline_s` and `failure`
    are as in Transport.run.
    """
    while True:
        left_s = deadline_s - time.monotonic()
        if is_done(min(left_s, FAILURE_POLL_S)):
            return None
        reason = "the time is up" if left_s <= 0 else failure()
        if reason is not None:
            return reason


class Transport(Protocol):
    def memory(self, peer: int) -> Tensor | None:
        """Return the int64 words shared with `peer`, where messages between the two must lie.

        None if nothing is shared; messages may then lie anywhere on `device(peer)`.
        """
        ...

    def device(self, peer: int) -> torch.device:
        """Return the device on which messages between this rank and `peer` must lie."""
        ...

    def send(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        """Start sending contiguous bytes to rank `peer`; `what` names them in errors.

        A later message of the same `number` to the same peer has the same length and may be sent as
        its difference.
        """
        ...

    def recv(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        """Start filling contiguous bytes from rank `peer`."""
        ...

    def run(self, deadline_s: float, failure: Callable[[], str | None], pending: int = 0) -> None:
        """Wait, oldest message first, until at most `pending` started messages are unfinished.

        Raises TransferError when time.monotonic() passes `deadline_s`, or when `failure`, called
        about twice a second, returns a reason why waiting is pointless.
        """
        ...

    def take_saved(self) -> int:
        """Return the bytes that did not travel because they were as before, since the last call."""
        ...

    def close(self) -> None:
        """Drop every connection; peers that wait for this rank fail."""
        ...
