"""Encodes messages between a store's client and server: a handshake by key, then lists of bytes.

server -> client   nonce_s, 32 random bytes
client -> server   nonce_c, 32 random bytes, and HMAC-SHA256(key, "client" nonce_s nonce_c)
server -> client   HMAC-SHA256(key, "server" nonce_s nonce_c)
then, in turns     a request and its answer: length, then the length and bytes of each field

The key itself is never sent. What follows the handshake is neither encrypted nor signed.
"""

import hmac
import secrets
import struct
from collections.abc import Sequence

NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_MESSAGE_BYTES = 64 * 2**20
"""A longer message ends the connection before it is read. The largest message, a rank's layout,
takes a few MiB."""
LENGTH = struct.Struct(">I")
_MAX_FIELDS = 1 << 20


class StoreMessageError(RuntimeError):
    """A message is longer than allowed, or not what the protocol says."""


def make_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def make_proof(key: str, who: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Return the proof that `who` ("client" or "server") knows the key."""
    return hmac.digest(key.encode(), who.encode() + server_nonce + client_nonce, "sha256")


def is_proof(given: bytes, key: str, who: str, server_nonce: bytes, client_nonce: bytes) -> bool:
    return hmac.compare_digest(given, make_proof(key, who, server_nonce, client_nonce))


def pack(fields: Sequence[bytes]) -> bytes:
    """Return the message of these fields; StoreMessageError if it is too long."""
    body = b"".join(part for field in fields for part in (LENGTH.pack(len(field)), field))
    check_length(len(body))
    return LENGTH.pack(len(body)) + body


def check_length(num_bytes: int) -> None:
    """Raise StoreMessageError if a message may not be so long."""
    if num_bytes > MAX_MESSAGE_BYTES:
        raise StoreMessageError(
            f"a message of {num_bytes} bytes is longer than {MAX_MESSAGE_BYTES}"
            " (MAX_MESSAGE_BYTES in mcore_rl/weight_sync/store/messages.py)"
        )


def unpack(body: bytes) -> list[bytes]:
    """Return the fields of a message's body; StoreMessageError if they don't fill the body."""
    fields: list[bytes] = []
    position = 0
    while position < len(body):
        start = position + LENGTH.size
        if start > len(body) or len(fields) == _MAX_FIELDS:
            raise StoreMessageError(f"a message of {len(body)} bytes is cut off at {position}")
        (num_bytes,) = LENGTH.unpack_from(body, position)
        position = start + num_bytes
        if position > len(body):
            raise StoreMessageError(f"a field of {num_bytes} bytes goes beyond its message")
        fields.append(body[start:position])
    return fields
