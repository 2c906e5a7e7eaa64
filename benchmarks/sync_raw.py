"""Measures the time of a bare copy between processes, and the cost of a checksum."""

import mmap
import os
import socket
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_rl.weight_sync.verify import ROW_WORDS, WORD_BYTES, XXH3, make_sums

SLOT_BYTES = 2 * 2**20
NUM_SLOTS = 4

Bytes = NDArray[np.uint8]


def raw_seconds(num_bytes: int, repeats: int) -> dict[str, float]:
    """Return the least seconds to copy `num_bytes` from one process to another, by transport."""
    return {
        "socket": _timed(_send_socket, _recv_socket, num_bytes, repeats),
        "shared memory": _timed(_send_shared, _recv_shared, num_bytes, repeats),
    }


def checksum_cost(num_bytes: int = 4 * 2**20, repeats: int = 50) -> float:
    """Return the CPU time of a checksum of freshly copied bytes, relative to that of the copy."""
    num_rows = num_bytes // (ROW_WORDS * WORD_BYTES)
    sums = make_sums(XXH3, 0, [num_rows])
    source_W = torch.ones(num_rows * ROW_WORDS, dtype=torch.int64)
    target_W = torch.zeros_like(source_W)
    copy_s = 0.0
    sum_s = 0.0
    for _ in range(repeats):
        began_s = time.thread_time()
        target_W.copy_(source_W)
        copied_s = time.thread_time()
        sums(target_W)
        copy_s += copied_s - began_s
        sum_s += time.thread_time() - copied_s
    return sum_s / copy_s


def _timed(
    send: Callable[[socket.socket, mmap.mmap, Bytes], None],
    recv: Callable[[socket.socket, mmap.mmap, Bytes], None],
    num_bytes: int,
    repeats: int,
) -> float:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ring = mmap.mmap(-1, NUM_SLOTS * SLOT_BYTES)
        pid = os.fork()
        if pid == 0:
            with socket.create_connection(server.getsockname()) as peer:
                source = np.ones(num_bytes, dtype=np.uint8)
                for _ in range(repeats):
                    peer.recv(1)
                    send(peer, ring, source)
                    peer.recv(1)
            os._exit(0)
        target = np.zeros(num_bytes, dtype=np.uint8)
        seconds = []
        peer = server.accept()[0]
        with peer:
            for _ in range(repeats):
                began_s = time.perf_counter()
                peer.send(b"g")
                recv(peer, ring, target)
                seconds.append(time.perf_counter() - began_s)
                peer.send(b"d")
        os.waitpid(pid, 0)
    assert target[0] == target[-1] == 1, "the bytes did not arrive"
    return min(seconds)


def _send_socket(peer: socket.socket, ring: mmap.mmap, source: Bytes) -> None:
    peer.sendall(source.data)


def _recv_socket(peer: socket.socket, ring: mmap.mmap, target: Bytes) -> None:
    view = target.data
    at = 0
    while at < len(view):
        at += peer.recv_into(view[at:])


def _send_shared(peer: socket.socket, ring: mmap.mmap, source: Bytes) -> None:
    """Copy each part to the next free slot of the ring and tell the other side by a byte."""
    slots = np.frombuffer(ring, dtype=np.uint8)
    for i, at in enumerate(range(0, len(source), SLOT_BYTES)):
        if i >= NUM_SLOTS:
            peer.recv(1)
        part = source[at : at + SLOT_BYTES]
        slot = i % NUM_SLOTS * SLOT_BYTES
        slots[slot : slot + len(part)] = part
        peer.send(b"s")
    for _ in range(min(NUM_SLOTS, -(-len(source) // SLOT_BYTES))):
        peer.recv(1)


def _recv_shared(peer: socket.socket, ring: mmap.mmap, target: Bytes) -> None:
    slots = np.frombuffer(ring, dtype=np.uint8)
    for i, at in enumerate(range(0, len(target), SLOT_BYTES)):
        peer.recv(1)
        part = target[at : at + SLOT_BYTES]
        slot = i % NUM_SLOTS * SLOT_BYTES
        part[:] = slots[slot : slot + len(part)]
        peer.send(b"r")
