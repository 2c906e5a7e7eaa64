"""Bytes between ranks behind three verbs: send, recv, run. Each link to an engine has its own transport.

`send` and `recv` start at once; `run` waits for what was started, which owns its memory until then. What
`recv` brought is valid until the next `run`.
"""

from collections.abc import Callable
from typing import Protocol

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


class Transport(Protocol):
    def memory(self, peer: int) -> Tensor | None:
        """int64 words that this rank and `peer` both see; messages between them lie there. None: none is."""
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
