"""Bytes between ranks behind three verbs: send, recv, run. Each link to an engine has its own transport.

`send` and `recv` start at once; `run` waits for what was started, which owns its memory until then. What
`recv` brought is valid until the next `run`.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

ASK_S = 0.5
"""How often a wait looks whether something elsewhere makes it pointless."""


class TransferError(RuntimeError):
    """Bytes that did not arrive, or arrived wrong; the message names who waited for whom, for what.

    `peer_lost` tells that another rank went away or kept us waiting, so that its own report says more.
    """

    def __init__(self, message: str, *, peer_lost: bool = False) -> None:
        super().__init__(message)
        self.peer_lost = peer_lost


def wait_until(
    is_done: Callable[[float], bool], deadline_s: float, failure: Callable[[], str | None]
) -> str | None:
    """None once `is_done`, which may wait for a sign of it as many seconds as it is told; else why not.

    `deadline_s` and `failure` as of Transport.run.
    """
    while True:
        left_s = deadline_s - time.monotonic()
        if is_done(min(left_s, ASK_S)):
            return None
        reason = "the time is up" if left_s <= 0 else failure()
        if reason is not None:
            return reason


class Transport(Protocol):
    def memory(self, peer: int) -> Tensor | None:
        """int64 words that this rank and `peer` both see; messages between them lie there. None: none is."""
        ...

    def device(self, peer: int) -> torch.device:
        """Where messages between this rank and `peer` must lie."""
        ...

    def send(self, tensor_u8: Tensor, peer: int, what: str) -> None:
        """Start sending contiguous bytes to rank `peer`; `what` names them in errors."""
        ...

    def recv(self, tensor_u8: Tensor, peer: int, what: str) -> None:
        """Start filling contiguous bytes from rank `peer`."""
        ...

    def run(self, deadline_s: float, failure: Callable[[], str | None], pending: int = 0) -> None:
        """Wait until at most `pending` of what was started is unfinished, the oldest first.

        TransferError when time.monotonic() passes `deadline_s`. `failure` is asked about twice a second
        whether something elsewhere makes waiting pointless, and what.
        """
        ...

    def close(self) -> None:
        """Drop every connection; peers that wait for this rank fail."""
        ...
