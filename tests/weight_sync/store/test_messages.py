"""The bytes between client and server of a store."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weight_sync.store import messages
from mcore_rl.weight_sync.store.messages import (
    LENGTH,
    StoreMessageError,
    check_length,
    is_proof,
    make_nonce,
    make_proof,
    pack,
    unpack,
)


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_messages_come_back(fields: list[bytes]) -> None:
    packed = pack(fields)
    (num_bytes,) = LENGTH.unpack(packed[: LENGTH.size])
    assert num_bytes == len(packed) - LENGTH.size
    assert unpack(packed[LENGTH.size :]) == fields


@given(st.binary(max_size=64))
def test_other_bytes_are_fields_or_an_error(body: bytes) -> None:
    try:
        fields = unpack(body)
    except StoreMessageError:
        return
    assert pack(fields)[LENGTH.size :] == body


def test_long_messages_are_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(StoreMessageError, match="a message of 104 bytes is longer than 100"):
        pack([b"x" * 100])
    with pytest.raises(StoreMessageError, match="4294967295 bytes"):
        check_length(0xFFFFFFFF)
    check_length(100)


def test_a_proof_is_of_one_key_one_side_and_one_pair_of_nonces() -> None:
    mine, theirs = make_nonce(), make_nonce()
    given_proof = make_proof("key", "client", mine, theirs)
    assert is_proof(given_proof, "key", "client", mine, theirs)
    for other in (
        ("other", "client", mine, theirs),
        ("key", "server", mine, theirs),
        ("key", "client", theirs, mine),
        ("key", "client", mine, make_nonce()),
    ):
        assert not is_proof(given_proof, *other)
    assert not is_proof(b"", "key", "client", mine, theirs)
