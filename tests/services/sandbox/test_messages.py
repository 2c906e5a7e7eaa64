"""Messages keep their bounds and descriptors, and a closed end is told from an empty one."""

import os
import time

import pytest

from mcore_rl.services.sandbox.messages import (
    MAX_BYTES,
    make_pair,
    memory_file,
    receive,
    send,
    wait_readable,
)


def test_messages_and_descriptors_arrive_one_by_one() -> None:
    here, there = make_pair()
    with here, there, memory_file(b"content") as file:
        send(here, {"a": 1}, [file.fileno()])
        send(here, {"b": "é"})
        first = receive(there)
        assert first is not None and first[0] == {"a": 1}
        assert os.pread(first[1][0], 9, 0) == b"content"
        os.close(first[1][0])
        assert receive(there) == ({"b": "é"}, [])
        here.close()
        assert receive(there) is None


def test_a_long_message_is_refused() -> None:
    here, there = make_pair()
    with here, there, pytest.raises(ValueError, match="at most"):
        send(here, {"paths": ["x"] * MAX_BYTES})


def test_waiting_ends_at_the_deadline() -> None:
    here, there = make_pair()
    with here, there:
        began_s = time.monotonic()
        assert wait_readable([there.fileno()], began_s + 0.1) == []
        assert time.monotonic() - began_s >= 0.1
        send(here, {})
        assert wait_readable([there.fileno()], None) == [there.fileno()]


def test_a_sealed_file_never_changes() -> None:
    with memory_file(b"stdin", is_sealed=True) as file:
        assert file.read() == b"stdin"
        with pytest.raises(PermissionError):
            os.pwrite(file.fileno(), b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(file.fileno(), 0)
