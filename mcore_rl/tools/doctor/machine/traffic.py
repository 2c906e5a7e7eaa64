"""Connects every node to every other, and measures bytes per second between them.

    listener of node r  <-- "?" --  node s      its answer: meeting's token, number r, its clock

An answer of another meeting or number unveils an address that many machines have (172.17.0.1).
torch.distributed measures the traffic in a process of its own, as a collective may hang or crash:

    python -m mcore_rl.tools.doctor.machine.traffic <spec as JSON> <file for the outcome>

    round 1: 0-3 1-2   round 2: 0-2 3-1   round 3: 0-1 2-3      each pair in both directions
    then all to all at once

Every received value is compared.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import mcore_rl
from mcore_rl.device import device, dist_backend, set_local_device, synchronize
from mcore_rl.process.safe_path import safe_module
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
def listen(
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


TcpStore: Any = distributed.TCPStore  # pyright: ignore[reportPrivateImportUsage]
MIB = 32
GPU_MIB = 256
LAST_CHARS = 600
PACKAGE_ROOT = Path(mcore_rl.__file__).resolve().parents[1]


@dataclass(frozen=True)
class TrafficSpec:
    """The task of one node's process. `port` is that of the store on node 0, at `host`."""

    rank: int
    size: int
    host: str
    port: int
    interface: str
    on_gpu: bool
    mib: int
    timeout_s: float


@dataclass(frozen=True)
class TrafficFigures:
    """Rates of one node in 10**9 bytes per second, sent plus received; by peer and all to all.

    error   why there are none; empty if there are
    """

    pairs: dict[int, float]
    all_to_all: float
    error: str = ""


def plan_rounds(size: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs: every pair once, every rank at most once a round (circle method)."""
    seats: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        met = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def measure_traffic(spec: TrafficSpec) -> TrafficFigures:
    """Run this node's process until its deadline; its errors are in the figures."""
    environment = dict(os.environ)
    paths = [str(PACKAGE_ROOT), *(path for path in sys.path if path)]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    if spec.interface:
        environment["GLOO_SOCKET_IFNAME"] = spec.interface
        environment.setdefault("NCCL_SOCKET_IFNAME", spec.interface)
    with tempfile.TemporaryDirectory(prefix="doctor_") as folder:
        out = Path(folder, "figures.json")
        arguments = [json.dumps(asdict(spec)), str(out)]
        command = [*safe_module("mcore_rl.tools.doctor.machine.traffic"), *arguments]
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=2 * spec.timeout_s,
            )
        except subprocess.TimeoutExpired:
            return TrafficFigures({}, 0.0, f"not done in {2 * spec.timeout_s:g} s")
        if not out.exists():
            words = " ".join(done.stderr.split())[-LAST_CHARS:]
            return TrafficFigures({}, 0.0, f"ended with status {done.returncode}: {words}")
        return parse_figures(json.loads(out.read_text()))


def parse_figures(value: dict[str, Any]) -> TrafficFigures:
    """Return the figures of a JSON object, whose keys are texts."""
    pairs = {int(peer): rate for peer, rate in value["pairs"].items()}
    return TrafficFigures(pairs, value["all_to_all"], value["error"])


def main(arguments: Sequence[str]) -> None:
    spec, out = TrafficSpec(**json.loads(arguments[0])), Path(arguments[1])
    figures = _exchange(spec)
    part = out.with_suffix(".part")
    part.write_text(json.dumps(asdict(figures)))
    part.replace(out)


def _exchange(spec: TrafficSpec) -> TrafficFigures:
    """Meet the other processes and exchange; raises what torch.distributed raises."""
    if spec.on_gpu:
        set_local_device(0)
    deadline = timedelta(seconds=spec.timeout_s)
    store = TcpStore(spec.host, spec.port, spec.size, spec.rank == 0, deadline)
    distributed.init_process_group(
        dist_backend() if spec.on_gpu else "gloo",
        store=store,
        rank=spec.rank,
        world_size=spec.size,
        timeout=deadline,
    )
    exchange = _Exchange(spec, device() if spec.on_gpu else torch.device("cpu"))
    rates = exchange.pairs()
    at_once = exchange.all_to_all()
    distributed.destroy_process_group()
    return TrafficFigures(rates, at_once)


class _Exchange:
    """Buffers of one node, all bytes of which are its rank, and what is sent from them."""

    def __init__(self, spec: TrafficSpec, where: torch.device) -> None:
        self._spec = spec
        self._num_bytes = spec.mib << 20
        self._one = torch.zeros(1, device=where)
        self._sent_u8 = torch.full((self._num_bytes,), spec.rank, dtype=torch.uint8, device=where)
        self._received_u8 = torch.empty_like(self._sent_u8)

    def pairs(self) -> dict[int, float]:
        """Return the rate with each peer, both directions together."""
        rates = {}
        rank = self._spec.rank
        for pairs in plan_rounds(self._spec.size):
            peers = [a + b - rank for a, b in pairs if rank in (a, b)]
            for peer in peers:
                self._swap(peer, 1024)  # connects
            self._wait_for_all()
            for peer in peers:
                began_s = time.monotonic()
                self._swap(peer, self._num_bytes)
                rates[peer] = 2 * self._num_bytes / 1e9 / (time.monotonic() - began_s)
                self._expect(peer, 0, self._num_bytes)
            self._wait_for_all()
        return rates

    def all_to_all(self) -> float:
        """Return the rate of this node while every node sends to every other."""
        size = self._spec.size
        share = self._num_bytes // size
        self._wait_for_all()
        began_s = time.monotonic()
        whole = slice(0, share * size)
        distributed.all_to_all_single(self._received_u8[whole], self._sent_u8[whole])
        synchronize()
        seconds = time.monotonic() - began_s
        for peer in range(size):
            self._expect(peer, peer * share, (peer + 1) * share)
        self._wait_for_all()
        return 2 * share * (size - 1) / 1e9 / seconds

    def _swap(self, peer: int, num_bytes: int) -> None:
        operations = [
            distributed.P2POp(distributed.isend, self._sent_u8[:num_bytes], peer),
            distributed.P2POp(distributed.irecv, self._received_u8[:num_bytes], peer),
        ]
        for work in distributed.batch_isend_irecv(operations):
            work.wait()
        synchronize()

    def _wait_for_all(self) -> None:
        distributed.all_reduce(self._one)
        synchronize()

    def _expect(self, peer: int, start: int, stop: int) -> None:
        if not bool((self._received_u8[start:stop] == peer).all()):
            raise RuntimeError(f"bytes from node {peer} are not those that it sent")


if __name__ == "__main__":
    main(sys.argv[1:])
