"""Tells a retry of a request from a new request that says the same.

A client that lost its answer asks again, and must be given the answer that the policy has already
made: one generation, one turn. A client that wants a second sample sends the same bytes as well.
So a request is a retry of an earlier one with the same bytes in the same session if

* it carries the Idempotency-Key of that one, or
* it says that it is a retry (x-stainless-retry-count), as the SDKs of OpenAI and Anthropic do, or
* the client of that one is gone and has not received the answer.

A retry takes the place of one attempt, so two equal requests whose connections break get two
answers back, not one of them twice.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mcore_rl.agents.gateway.errors import BadRequest
from mcore_rl.process.clock import now_s

_KEY_LEN = 256
"""Characters of the longest Idempotency-Key."""


@dataclass(frozen=True)
class Mark:
    """Identifies a request.

    fingerprint       hash of its path and bytes
    idempotency_key   empty if the client gave none
    """

    fingerprint: bytes
    idempotency_key: str = ""
    is_retry: bool = False


@dataclass(frozen=True)
class Rendered:
    """An answer as it is sent: a retry gets the same bytes, and no tokens are kept for it.

    turn   number of the turn in its episode
    data   a body of JSON, or all events of a stream
    """

    turn: int
    data: bytes


@dataclass(eq=False)
class Attempt:
    """A generation, and the client that waits for it.

    is_connected   tells whether that client is still there
    ended_s        when the generation was over, by process/clock.py
    """

    mark: Mark
    task: "asyncio.Task[Rendered]"
    is_connected: Callable[[], bool]
    is_delivered: bool = False
    ended_s: float | None = None

    @property
    def has_failed(self) -> bool:
        done = self.task.done()
        return done and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def is_lost(self) -> bool:
        return not (self.has_failed or self.is_delivered or self.is_connected())


class Attempts:
    """The attempts of one session: those that run, and those that ended within `window_s`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._kept: list[Attempt] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, attempt: Attempt) -> None:
        self._kept.append(attempt)
        attempt.task.add_done_callback(lambda task: _note_end(attempt))

    def claim(self, mark: Mark, is_connected: Callable[[], bool]) -> Attempt | None:
        """Return the attempt that a request retries, for its client to wait on; None: a new one.

        BadRequest: the Idempotency-Key belongs to a request that says something else.
        """
        self._forget_old()
        attempt = self._by_key(mark) if mark.idempotency_key else self._retried(mark)
        if attempt is None:
            return None
        if attempt.has_failed:
            self._kept.remove(attempt)
            return None
        attempt.is_connected = is_connected
        attempt.is_delivered = False
        return attempt

    def cancel(self) -> "list[asyncio.Task[Rendered]]":
        """Cancel every generation, forget all attempts, and return those that have to end yet."""
        running = [attempt.task for attempt in self._kept if not attempt.task.done()]
        for task in running:
            task.cancel()
        self._kept.clear()
        return running

    def _by_key(self, mark: Mark) -> Attempt | None:
        for attempt in self._kept:
            if attempt.mark.idempotency_key == mark.idempotency_key:
                if attempt.mark.fingerprint != mark.fingerprint:
                    raise BadRequest(
                        "Idempotency-Key", "belongs to another request; use a new key for each"
                    )
                return attempt
        return None

    def _retried(self, mark: Mark) -> Attempt | None:
        """Return the likeliest attempt: one whose client is gone, else, of a marked retry, one that
        failed, one that runs, one that was answered.
        """
        same = [a for a in self._kept if a.mark.fingerprint == mark.fingerprint]
        lost = next((attempt for attempt in same if attempt.is_lost), None)
        if lost is not None or not mark.is_retry:
            return lost
        failed = next((attempt for attempt in same if attempt.has_failed), None)
        running = next((attempt for attempt in same if not attempt.task.done()), None)
        return failed or running or (same[-1] if same else None)

    def _forget_old(self) -> None:
        oldest_s = now_s() - self._window_s
        self._kept = [a for a in self._kept if a.ended_s is None or a.ended_s >= oldest_s]


def _note_end(attempt: Attempt) -> None:
    attempt.ended_s = now_s()
    if not attempt.task.cancelled():
        attempt.task.exception()  # asyncio complains about errors that nobody looked at


def read_mark(headers: Mapping[str, str], fingerprint: bytes) -> Mark:
    """Return the mark of a request by its headers."""
    key = headers.get("Idempotency-Key", "")
    if len(key) > _KEY_LEN:
        raise BadRequest("Idempotency-Key", f"has {len(key)} characters, at most {_KEY_LEN}")
    retries = headers.get("x-stainless-retry-count", "0")
    is_retry = retries.isascii() and retries.isdigit() and int(retries[:9]) > 0
    return Mark(fingerprint, key, is_retry)
