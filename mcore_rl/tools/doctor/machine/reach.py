"""Connects every node to every other at the address of its interface, and exchanges times.

    listener of node r  <-- "?" --  node s      its answer: meeting's token, number r, its clock

An answer of another meeting or number unveils an address that many machines have (172.17.0.1).
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.tools.doctor.machine.clock import TimeSample

QUESTIONS = 5
CONNECT_S = 5.0
CONNECTIONS = 16


@dataclass(frozen=True)
class PeerAddress:
    """Where a node listens."""

    host: str
    port: int


@dataclass(frozen=True)
class PeerAnswer:
    """Whether a peer was reached: `error` is empty then, and there are samples of its clock."""

    error: str = ""
    samples: Sequence[TimeSample] = field(default_factory=tuple)


@contextmanager
def listening(
    host: str, token: str, rank: int, clock: Callable[[], float] = time.time
) -> Iterator[PeerAddress]:
    """Answer the questions of peers at `host` until the body ends; yield the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind((host, 0))
        server.listen(256)
        stop = threading.Event()
        server.settimeout(0.2)
        known = {"token": token, "rank": rank}
        arguments = (server, known, clock, stop)
        thread = threading.Thread(target=_accept, args=arguments, daemon=True)
        thread.start()
        try:
            yield PeerAddress(host, server.getsockname()[1])
        finally:
            stop.set()
            thread.join(timeout=5)


def _accept(
    server: socket.socket,
    known: Mapping[str, object],
    clock: Callable[[], float],
    stop: threading.Event,
) -> None:
    while not stop.is_set():
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        except OSError:
            return
        threading.Thread(target=_serve, args=(connection, known, clock), daemon=True).start()


def _serve(
    connection: socket.socket, known: Mapping[str, object], clock: Callable[[], float]
) -> None:
    with connection, connection.makefile("rwb") as stream:
        connection.settimeout(CONNECT_S)
        try:
            while stream.readline():
                stream.write(json.dumps({**known, "time": clock()}).encode() + b"\n")
                stream.flush()
        except OSError:
            return  # the peer says what it missed


def reach_all(
    peers: Sequence[PeerAddress | None],
    token: str,
    clock: Callable[[], float] = time.time,
) -> list[PeerAnswer]:
    """Ask every peer, all at once; None stands for this node itself. Never raises for a peer."""
    with ThreadPoolExecutor(CONNECTIONS) as pool:

        def ask(rank: int) -> PeerAnswer:
            peer = peers[rank]
            return PeerAnswer() if peer is None else reach(peer, token, rank, clock)

        return list(pool.map(ask, range(len(peers))))


def reach(peer: PeerAddress, token: str, rank: int, clock: Callable[[], float]) -> PeerAnswer:
    """Ask a peer for its number and its time, or say why that failed."""
    where = f"{peer.host} port {peer.port}"
    samples = []
    answer: dict[str, Any] = {}
    try:
        with (
            socket.create_connection((peer.host, peer.port), timeout=CONNECT_S) as connection,
            connection.makefile("rwb") as stream,
        ):
            for _ in range(QUESTIONS):
                sent_s = clock()
                stream.write(b"?\n")
                stream.flush()
                answer = json.loads(stream.readline())
                samples.append(TimeSample(sent_s, answer["time"], clock()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error) if isinstance(error, OSError) else "another program answers"
        return PeerAnswer(f"{where}: {reason}")
    if (answer.get("token"), answer.get("rank")) != (token, rank):
        return PeerAnswer(f"{where} leads to another machine, which has the same address")
    return PeerAnswer("", tuple(samples))
