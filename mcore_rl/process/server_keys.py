"""The random keys of a run's HTTP servers, and how they reach a server's process.

They travel in objects and through inherited file descriptors, never in command lines or
environment variables, which other users of the machine can read.
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

KEYS_FD = "--keys-fd"
"""The option by which a server is told the file descriptor of its keys."""
_NUM_BYTES = 32
_SHORTEST = 16
"""Characters of the shortest key that a file may hold."""
_PIPE_BYTES = 4096
"""A pipe takes so much at once, so keys are written before anyone reads."""


@dataclass(frozen=True)
class ServerKeys:
    """The keys that a request brings in its header `Authorization: Bearer <key>`.

    user    for requests that sample, score or ask about the model; empty: they need no key
    admin   for requests that change weights or memory, pause, or end others' requests
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
    """Return the headers of a request with `key`; none if it is empty."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def user_headers(keys: ServerKeys | None) -> Mapping[str, str]:
    """Return the headers with which a server that has these keys samples."""
    return {} if keys is None else keys.user_headers


def admin_headers(keys: ServerKeys | None) -> Mapping[str, str]:
    """Return the headers with which a server that has these keys takes commands."""
    return {} if keys is None else keys.admin_headers


@contextmanager
def passed_to_child(keys: ServerKeys | None) -> Iterator[int | None]:
    """Yield a file descriptor for a child to inherit and to hand to `read_keys`; None without keys.

    The child must be started inside the block.
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
    """Return the keys that the parent left, and close the descriptor, so that no child gets it."""
    with os.fdopen(descriptor, "rb") as pipe:
        user, admin = json.loads(pipe.read())
    return ServerKeys(user, admin)


def read_key_file(path: Path) -> str:
    """Return the key in a file, which only its owner may read; ValueError says what is wrong."""
    key = read_secret(path, f"--key-file={path}")
    if len(key) < _SHORTEST or not key.isascii() or any(char.isspace() for char in key):
        raise ValueError(
            f"--key-file={path}: it must hold one key of at least {_SHORTEST} ASCII characters"
            " without spaces, such as `openssl rand -hex 32` prints"
        )
    return key


def read_secret(path: Path, option: str) -> str:
    """Return the text of a file that only its owner may read; ValueError, beginning with `option`,
    says what is wrong.
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
    """Return whether an Authorization header brings `key`."""
    scheme, _, given = header.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), key.encode())
