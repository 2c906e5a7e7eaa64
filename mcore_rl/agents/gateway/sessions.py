"""Sessions of a gateway: who may speak in which episode, and which requests are retries.

A client that lost its answer asks again, and must be given the answer that the policy has already
made: one generation, one turn. A client that wants a second sample sends the same bytes as well.
So a request is a retry of an earlier one with the same bytes in the same session if

* it carries the Idempotency-Key of that one, or
* it says that it is a retry (x-stainless-retry-count), as the SDKs of OpenAI and Anthropic do, or
* the client of that one is gone and has not received the answer.

A retry takes the place of one attempt, so two equal requests whose connections break get two
answers back, not one of them twice. A request that was refused takes a place as well, although it
has no attempt: what says that it is a retry begins a generation of its own.
"""

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from mcore_rl.agents.gateway.api import ApiError, BadRequestError, Memory
from mcore_rl.agents.messages import ChatRequest, Completion
from mcore_rl.process.clock import now_s

_KEY_LEN = 256
"""Characters of the longest Idempotency-Key."""


_NUM_BYTES = 32


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


@dataclass(eq=False)
class Arrival:
    """A request without a generation: it waits to be taken, was refused, or its client left.

    ended_s   when it was refused or found to be left, by process/clock.py; None: it waits
    """

    mark: Mark
    is_connected: Callable[[], bool]
    ended_s: float | None = None

    @property
    def is_over(self) -> bool:
        return self.ended_s is not None or not self.is_connected()


class Attempts:
    """The attempts of one session: those that run, and those that ended within `window_s`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._kept: list[Attempt] = []
        self._arrivals: list[Arrival] = []

    def __len__(self) -> int:
        return len(self._kept) + len(self._arrivals)

    @contextmanager
    def keep_arrival(self, mark: Mark, is_connected: Callable[[], bool]) -> Iterator[None]:
        """Remember a request while it waits to be taken, and afterwards if that fails."""
        arrival = Arrival(mark, is_connected)
        self._arrivals.append(arrival)
        try:
            yield
            if arrival in self._arrivals:
                self._arrivals.remove(arrival)
        finally:
            arrival.ended_s = now_s()

    def add(self, attempt: Attempt) -> None:
        self._kept.append(attempt)
        attempt.task.add_done_callback(lambda task: _note_end(attempt))

    def claim(self, mark: Mark, is_connected: Callable[[], bool]) -> Attempt | None:
        """Return the attempt that a request retries, for its client to wait on; None: a new one.

        The retry of a request that was never taken is a new one.
        BadRequestError: the Idempotency-Key belongs to a request that says something else.
        """
        self._forget_old()
        attempt = self._by_key(mark) if mark.idempotency_key else self._find_retried(mark)
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
        self._arrivals.clear()
        return running

    def _by_key(self, mark: Mark) -> Attempt | None:
        for attempt in self._kept:
            if attempt.mark.idempotency_key == mark.idempotency_key:
                if attempt.mark.fingerprint != mark.fingerprint:
                    raise BadRequestError(
                        "Idempotency-Key", "belongs to another request; use a new key for each"
                    )
                return attempt
        return None

    def _find_retried(self, mark: Mark) -> Attempt | None:
        """Return the likeliest attempt: one whose client is gone, else, of a marked retry, one that
        failed, one that runs, one that was answered.

        A marked retry of a request that was never taken takes the place of that one: None.
        """
        same = [a for a in self._kept if a.mark.fingerprint == mark.fingerprint]
        lost = next((attempt for attempt in same if attempt.is_lost), None)
        if lost is not None or not mark.is_retry:
            return lost
        failed = next((attempt for attempt in same if attempt.has_failed), None)
        if failed is None and self._drop_arrival(mark):
            return None
        running = next((attempt for attempt in same if not attempt.task.done()), None)
        return failed or running or (same[-1] if same else None)

    def _drop_arrival(self, mark: Mark) -> bool:
        """Forget a request that is over and says the same; return whether there was one.

        With an Idempotency-Key, its retry is known by that.
        """
        for arrival in self._arrivals:
            known = arrival.mark
            is_same = known.fingerprint == mark.fingerprint and not known.idempotency_key
            if is_same and arrival.is_over:
                self._arrivals.remove(arrival)
                return True
        return False

    def _forget_old(self) -> None:
        oldest_s = now_s() - self._window_s
        self._kept = [a for a in self._kept if a.ended_s is None or a.ended_s >= oldest_s]
        self._arrivals = [a for a in self._arrivals if a.ended_s is None or a.ended_s >= oldest_s]


def _note_end(attempt: Attempt) -> None:
    attempt.ended_s = now_s()
    if not attempt.task.cancelled():
        attempt.task.exception()  # asyncio complains about errors that nobody looked at


def read_mark(headers: Mapping[str, str], fingerprint: bytes) -> Mark:
    """Return the mark of a request by its headers."""
    key = headers.get("Idempotency-Key", "")
    if len(key) > _KEY_LEN:
        raise BadRequestError("Idempotency-Key", f"has {len(key)} characters, at most {_KEY_LEN}")
    retries = headers.get("x-stainless-retry-count", "0")
    is_retry = retries.isascii() and retries.isdigit() and int(retries[:9]) > 0
    return Mark(fingerprint, key, is_retry)


class OverloadedError(Exception):
    """The policy takes no further request now; the client may ask again after `retry_after_s`."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the engines are busy; ask again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class EpisodeChat(Protocol):
    """Records one episode. All calls come on the gateway's event loop."""

    async def complete(self, request: ChatRequest) -> Completion:
        """Sample the policy's next message; raises EpisodeEndedError or OverloadedError."""
        ...

    def add_reward(self, reward: float, turn: int | None) -> None:
        """Add to the reward of a turn, or of the episode if `turn` is None.

        ValueError: the episode has no such turn. EpisodeEndedError: it takes no more rewards.
        """
        ...


@dataclass(frozen=True)
class Session:
    """How a program reaches its episode.

    key             API key; random
    id              names the session in URLs and in X-Session-ID; random, and as secret as the key
    openai_url      base URL for clients of OpenAI's API, OPENAI_BASE_URL; needs the key
    anthropic_url   base URL for clients of Anthropic's API, ANTHROPIC_BASE_URL; needs the key
    keyless_url     as anthropic_url, and with /v1 as openai_url, for a program that cannot be
                    given a key: it holds the id, which HTTP clients write into their logs
    """

    key: str = field(repr=False)
    id: str = field(repr=False)
    openai_url: str = field(repr=False)
    anthropic_url: str = field(repr=False)
    keyless_url: str = field(repr=False)


@dataclass(eq=False)
class OpenSession:
    """An episode while it is open; `number` names it in logs, which its key must never do."""

    number: int
    session: Session
    chat: EpisodeChat
    attempts: Attempts
    memory: Memory = field(default_factory=Memory)
    num_turns: int = 0
    num_prompt_tokens: int = 0
    num_sampled_tokens: int = 0
    num_refused: int = 0
    answer_s: float = 0.0
    has_logged_ignored: bool = False
    is_closed: bool = False

    def note(self, completion: Completion, seconds: float) -> None:
        """Count an answer that took so long."""
        self.num_turns += 1
        self.num_prompt_tokens += len(completion.prompt_ids)
        self.num_sampled_tokens += len(completion.token_ids)
        self.answer_s += seconds

    def metrics(self) -> dict[str, float]:
        """Return what an episode's metrics show of its session."""
        return {"refused": float(self.num_refused), "answer_s": self.answer_s}


class SessionTable:
    """Finds the session of a request. Only hashes of keys are looked up, so time tells nothing."""

    def __init__(self, run_key: str, retry_window_s: float) -> None:
        self._run_key = run_key
        self._retry_window_s = retry_window_s
        self._by_key: dict[bytes, OpenSession] = {}
        self._by_id: dict[bytes, OpenSession] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def open(self, chat: EpisodeChat, url: str) -> Session:
        """Return a new session for an episode, under the gateway's URL."""
        self._num_opened += 1
        identity = secrets.token_urlsafe(_NUM_BYTES)
        session = Session(
            key=f"sk-{secrets.token_urlsafe(_NUM_BYTES)}",
            id=identity,
            openai_url=f"{url}/v1",
            anthropic_url=url,
            keyless_url=f"{url}/s/{identity}",
        )
        opened = OpenSession(self._num_opened, session, chat, Attempts(self._retry_window_s))
        self._by_key[_digest(session.key)] = opened
        self._by_id[_digest(session.id)] = opened
        return session

    def remove(self, key: str) -> OpenSession | None:
        """Forget a session and return it; None if there is none with this key."""
        opened = self._by_key.pop(_digest(key), None)
        if opened is not None:
            opened.is_closed = True
            del self._by_id[_digest(opened.session.id)]
        return opened

    def list_open(self) -> list[OpenSession]:
        return list(self._by_key.values())

    def find(self, headers: Mapping[str, str], path_id: str | None) -> OpenSession:
        """Return the session of a request to a model; ApiError if it has none.

        An id in the path suffices, as it is secret itself. The key of another session is refused.
        """
        key = read_given_key(headers)
        by_path = None if path_id is None else self._by_id.get(_digest(path_id))
        if path_id is not None and by_path is None:
            raise _unknown()
        by_key = self._by_key.get(_digest(key))
        if by_path is not None:
            if by_key not in (None, by_path):
                raise ApiError(401, "invalid_api_key", "the key belongs to another session")
            return by_path
        if by_key is None and self.is_run_key(key) and "X-Session-ID" in headers:
            by_key = self._by_id.get(_digest(headers["X-Session-ID"]))
        if by_key is None:
            raise _unknown()
        return by_key

    def find_own(self, headers: Mapping[str, str], path_id: str) -> OpenSession:
        """Return the session with this id, if the request brings its key or the run's."""
        key = read_given_key(headers)
        opened = self._by_id.get(_digest(path_id))
        if opened is None or not (self._by_key.get(_digest(key)) is opened or self.is_run_key(key)):
            raise _unknown()
        return opened

    def is_run_key(self, key: str) -> bool:
        return hmac.compare_digest(_digest(key), _digest(self._run_key))


def read_given_key(headers: Mapping[str, str]) -> str:
    """Return the key of a request as OpenAI's or Anthropic's clients send it; empty: none."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key:
        return key
    return headers.get("x-api-key", "")


def _unknown() -> ApiError:
    return ApiError(401, "invalid_api_key", "no open session has this key; it may have been closed")


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
