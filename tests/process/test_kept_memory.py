"""Kept memory outlives who wrote it, and ends with its holder."""

import multiprocessing as mp
import os
import signal
from multiprocessing.connection import Connection

import pytest

from mcore_rl.process.kept_memory import KeptMemory, map_kept


def write_and_die(path: str) -> None:
    with map_kept(path) as piece:
        piece[10:15] = b"state"
        os.kill(os.getpid(), signal.SIGKILL)


def hold(name: str, connection: Connection) -> None:
    memory = KeptMemory()
    connection.send(memory.reserve(name, 4096))
    connection.recv()


def test_what_a_killed_process_wrote_is_there() -> None:
    memory = KeptMemory()
    path = memory.reserve("rank0", 8192)
    writer = mp.get_context("spawn").Process(target=write_and_die, args=(path,))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    with map_kept(path) as piece:
        assert piece[8:17] == b"\0\0state\0\0" and len(piece) == 8192
    memory.close()


def test_it_ends_with_a_holder_that_is_killed() -> None:
    ours, theirs = mp.Pipe()
    holder = mp.get_context("spawn").Process(target=hold, args=("rank0", theirs))
    holder.start()
    path = ours.recv()
    map_kept(path).close()
    holder.kill()
    holder.join()
    with pytest.raises(ValueError, match=f"{path}: .* cannot be opened"):
        map_kept(path)
