"""Sessions of a gateway: who may speak in which episode."""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from mcore_rl.agents.gateway.api import Memory
from mcore_rl.agents.gateway.attempts import Attempts
from mcore_rl.agents.gateway.episode_chat import EpisodeChat
from mcore_rl.agents.gateway.errors import ApiError
from mcore_rl.agents.messages import Completion

_NUM_BYTES = 32


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

    def opened(self) -> list[OpenSession]:
        return list(self._by_key.values())

    def find(self, headers: Mapping[str, str], path_id: str | None) -> OpenSession:
        """Return the session of a request to a model; ApiError if it has none.

        An id in the path suffices, as it is secret itself. The key of another session is refused.
        """
        key = given_key(headers)
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
        key = given_key(headers)
        opened = self._by_id.get(_digest(path_id))
        if opened is None or not (self._by_key.get(_digest(key)) is opened or self.is_run_key(key)):
            raise _unknown()
        return opened

    def is_run_key(self, key: str) -> bool:
        return hmac.compare_digest(_digest(key), _digest(self._run_key))


def given_key(headers: Mapping[str, str]) -> str:
    """Return the key of a request as OpenAI's or Anthropic's clients send it; empty: none."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key:
        return key
    return headers.get("x-api-key", "")


def _unknown() -> ApiError:
    return ApiError(401, "invalid_api_key", "no open session has this key; it may have been closed")


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
