"""Waits for other ranks of a link, until a deadline or until the link has failed."""

import time
from collections.abc import Callable

FAILURE_POLL_S = 0.5
"""How often a wait checks whether the link has failed elsewhere."""


class TransferError(RuntimeError):
    """Bytes did not arrive, or arrived wrong; the message names who waited for whom, for what.

    `peer_lost` is set if a peer went away or kept this rank waiting; the peer's report says more.
    """

    def __init__(self, message: str, *, peer_lost: bool = False) -> None:
        super().__init__(message)
        self.peer_lost = peer_lost


def wait_until(
    is_done: Callable[[float], bool], deadline_s: float, failure: Callable[[], str | None]
) -> str | None:
    """Wait until `is_done(timeout_s)` returns True; return None, or the reason why it did not.

    `is_done` may block for at most `timeout_s`. `deadline_s` and `failure`
    are as in Transport.run.
    """
    while True:
        left_s = deadline_s - time.monotonic()
        if is_done(min(left_s, FAILURE_POLL_S)):
            return None
        reason = "the time is up" if left_s <= 0 else failure()
        if reason is not None:
            return reason
