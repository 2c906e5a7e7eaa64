"""Makes, passes and checks the keys of a run's HTTP servers, and reads what their clients send.

Keys travel in objects and through inherited file descriptors, never in command lines or environment
variables, which other users of the machine can read. Servers beside collectors are the exception;
variables have their addresses with keys:

collector --starts--> sandbox, search
    |  MCORE_RL_SANDBOX_URL, MCORE_RL_SEARCH_URL
    v
reward functions, workers of environments, programs of agents
"""

import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

SANDBOX_URL = "MCORE_RL_SANDBOX_URL"
SEARCH_URL = "MCORE_RL_SEARCH_URL"


def read_sandbox_url() -> str:
    """Return the address of the run's sandbox with /run_code and key; empty if there is none."""
    return os.environ.get(SANDBOX_URL, "")


def read_search_url() -> str:
    """Return the address of the run's search with /retrieve and key; empty if there is none."""
    return os.environ.get(SEARCH_URL, "")


def publish(urls: Mapping[str, str]) -> None:
    """Set each variable to its address, for this process and its later children."""
    os.environ.update(urls)


def withdraw(urls: Mapping[str, str]) -> None:
    """Undo `publish` for each variable that still has this address."""
    for name, url in urls.items():
        if os.environ.get(name) == url:
            del os.environ[name]


def split_key(url: str) -> tuple[str, str]:
    """Return (the URL without user and password, the password or "")."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=host)), parts.password or ""


def parse_json(data: bytes) -> Any:
    """Return the JSON value of a body. Raises ValueError if it is no JSON or nested too deeply."""
    try:
        return json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"the body is no JSON: {error}") from None
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None


def read_call_arguments(given: object) -> str:
    """Return the arguments of a tool call in a history, as the text of a JSON object.

    Missing arguments give `{}`. Raises ValueError with the reason if the arguments are no JSON
    object, because chat templates read one.
    """
    if given is None or (isinstance(given, str) and not given.strip()):
        return "{}"
    if not isinstance(given, str):
        raise ValueError(f"must be a string of JSON, not {type(given).__name__}")
    import orjson  # Late: an environment's worker may lack it.

    try:
        value: Any = orjson.loads(given)
    except orjson.JSONDecodeError as error:
        raise ValueError(
            f"must be an object of JSON, but {given[:40]!r} is no JSON: {error}"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"must be an object of JSON, as templates want, not {given[:40]!r}")
    return given


KEYS_FD = "--keys-fd"
"""The option with the file descriptor of a server's keys."""
_NUM_BYTES = 32
_SHORTEST = 16
"""Fewest characters of a key in a file."""
_PIPE_BYTES = 4096
"""A pipe buffers this many bytes, so keys can be written before the child reads."""


@dataclass(frozen=True)
class ServerKeys:
    """The keys of requests, sent in the header `Authorization: Bearer <key>`.

    user    for requests that sample, score or ask about the model; empty: no key needed
    admin   for requests that change weights or memory, pause, or end other clients' requests
    """

    user: str = field(repr=False)
    admin: str = field(repr=False)

    def __post_init__(self) -> None:
        if not self.admin:
            raise ValueError("an HTTP server's admin key is empty, so anyone could replace weights")

    @staticmethod
    def make() -> "ServerKeys":
        """Return new random keys."""
        return ServerKeys(secrets.token_urlsafe(_NUM_BYTES), secrets.token_urlsafe(_NUM_BYTES))

    @property
    def user_headers(self) -> dict[str, str]:
        return bearer(self.user)

    @property
    def admin_headers(self) -> dict[str, str]:
        return bearer(self.admin)

    def admits_user(self, header: str) -> bool:
        """Return whether a request with this Authorization header may sample."""
        return not self.user or is_bearer(header, self.user) or self.admits_admin(header)

    def admits_admin(self, header: str) -> bool:
        """Return whether a request with this Authorization header may change the engine."""
        return is_bearer(header, self.admin)


def bearer(key: str) -> dict[str, str]:
    """Return the headers of a request with `key`; {} for an empty key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def user_headers(keys: ServerKeys | None) -> Mapping[str, str]:
    """Return the headers of requests that sample from a server with these keys."""
    return {} if keys is None else keys.user_headers


def admin_headers(keys: ServerKeys | None) -> Mapping[str, str]:
    """Return the headers of commands to a server with these keys."""
    return {} if keys is None else keys.admin_headers


@contextmanager
def pass_to_child(keys: ServerKeys | None) -> Iterator[int | None]:
    """Yield a file descriptor that a child inherits and gives to `read_keys`; None without keys.

    Start the child inside the block.
    """
    if keys is None:
        yield None
        return
    data = json.dumps([keys.user, keys.admin]).encode()
    assert len(data) <= _PIPE_BYTES, f"keys of {len(data)} bytes"
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, data)
        os.close(write_end)
        yield read_end
    finally:
        os.close(read_end)


def read_keys(descriptor: int) -> ServerKeys:
    """Read the keys from the parent, and close the descriptor before a child inherits it."""
    with os.fdopen(descriptor, "rb") as pipe:
        user, admin = json.loads(pipe.read())
    return ServerKeys(user, admin)


def read_key_file(path: Path) -> str:
    """Return the key in a file that only its owner may read. Raises ValueError otherwise."""
    key = read_secret(path, f"--key-file={path}")
    if len(key) < _SHORTEST or not key.isascii() or any(char.isspace() for char in key):
        raise ValueError(
            f"--key-file={path}: it must hold one key of at least {_SHORTEST} ASCII characters"
            " without spaces, such as `openssl rand -hex 32` prints"
        )
    return key


def read_secret(path: Path, option: str) -> str:
    """Return the text of a file that only its owner may read.

    Raises ValueError, beginning with `option`, if the file is missing or no text, or if other users
    may read it.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option}: {error}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ValueError(
            f"{option}: others may read it (mode {stat.S_IMODE(mode):o}): chmod 600 {path}"
        )
    return text


def is_bearer(header: str, key: str) -> bool:
    """Return whether an Authorization header carries `key`."""
    scheme, _, given = header.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), key.encode())
