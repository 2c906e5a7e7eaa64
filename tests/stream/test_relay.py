"""Slices that one engine passes on to the next: values, checksums, and who fails with whom."""

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.stream.link_end import LinkEnd
from mcore_rl.stream.link_store import LinkStore
from mcore_rl.stream.receiver import WeightReceiver
from mcore_rl.stream.routes.choice import MakeTransport, make_gloo_transport, make_routed_transport
from mcore_rl.stream.routes.transport import Transport
from mcore_rl.stream.sender import WeightSender
from mcore_rl.stream.wire import Action, Command, Link, Report, StageRequest
from tests.support.processes import Fault, FaultyTransport
from tests.support.sync_layouts import FusedEngine, expert_cut, make_tensors

pytestmark = pytest.mark.gloo

NUM_SENDERS, NUM_RANKS, TIMEOUT_S = 2, 2, 20.0


Faults = Mapping[tuple[str, str], Fault]
"""By (upstream, engine) of the link on which they happen, to the sender of that rank."""


class Chain:
    """Two trainer ranks and engines of two ranks each, all in threads of this process."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        num_engines: int,
        make_transport: MakeTransport,
        faults: Faults,
    ) -> None:
        self._pool, self._make_transport, self._faults = pool, make_transport, faults
        self.stores = [LinkStore.serve("127.0.0.1", TIMEOUT_S) for _ in range(num_engines)]
        self.links = [self._link(i, store) for i, store in enumerate(self.stores)]
        self.relay_stores: list[LinkStore] = []
        self._senders, self._sources = [], []
        for rank in range(NUM_SENDERS):
            shards, tensors = expert_cut(make_tensors(seed=0), rank, NUM_SENDERS, "float32")
            self._sources.append(tensors)
            self._senders.append(WeightSender(shards, tensors, rank, self._make))
        self.engines = [
            [FusedEngine(rank, NUM_RANKS, torch.float32) for rank in range(NUM_RANKS)]
            for _ in self.links
        ]
        self._receivers = [
            [WeightReceiver(self._make) for _ in range(NUM_RANKS)] for _ in self.links
        ]
        self._orders = [0] * num_engines
        for i, link in enumerate(self.links):
            sending = [pool.submit(sender.connect, link) for sender in self._senders]
            reports = self._handle(i, "connect") + [future.result() for future in sending]
            assert [report.error for report in reports] == [None] * len(reports)

    def relay(self, i: int) -> Link:
        """A new link from engine `i` to the next one."""
        self.relay_stores.append(LinkStore.serve("127.0.0.1", TIMEOUT_S))
        port = self.relay_stores[-1].port
        return replace(
            self.links[i + 1], store_port=port, num_senders=NUM_RANKS, relay=f"engine-{i}"
        )

    def move(
        self, version: int, orders: Mapping[int, StageRequest]
    ) -> tuple[dict[int, list[Report]], list[dict[str, Report]]]:
        """What the ranks of the engines with orders say, and the trainer ranks, which send to the first."""
        for rank, tensors in enumerate(self._sources):
            newer = expert_cut(make_tensors(seed=version), rank, NUM_SENDERS, "float32")[1]
            for name, tensor in tensors.items():
                tensor.copy_(newer[name])
        heads = [self.links[i].engine for i, order in orders.items() if order.receive_link is None]
        sending = [self._pool.submit(s.send, version, heads, TIMEOUT_S) for s in self._senders]
        for i, order in orders.items():
            self.stores[i].put_stage_request(self._orders[i], order)
            self._orders[i] += 1
        received = {i: [self._report(i, rank) for rank in range(NUM_RANKS)] for i in orders}
        return received, [future.result() for future in sending]

    def swap(self, i: int, version: int) -> None:
        """Also checks what engine `i` then holds."""
        assert [report.error for report in self._handle(i, "swap", version)] == [None] * NUM_RANKS
        for rank, engine in enumerate(self.engines[i]):
            expected = FusedEngine(rank, NUM_RANKS, torch.float32)
            expected.load_weights(make_tensors(seed=version).items())
            for name, wanted in expected.named_parameters():
                assert torch.equal(engine.get_parameter(name), wanted), (
                    f"engine {i} rank {rank} {name}"
                )

    def close(self) -> None:
        for receivers in self._receivers:
            for receiver in receivers:
                receiver.close()
        for sender in self._senders:
            for link in self.links:
                sender.disconnect(link.engine)
        self.stores.clear()
        self.relay_stores.clear()

    def _handle(self, i: int, action: Action, version: int | None = None) -> list[Report]:
        def handle(rank: int) -> Report:
            engine = self.engines[i][rank]
            tensors = dict(engine.named_parameters())
            command = Command(self.links[i], action, version)
            return self._receivers[i][rank].handle(command, rank, engine.load_weights, tensors)

        return list(self._pool.map(handle, range(NUM_RANKS)))

    def _report(self, i: int, rank: int) -> Report:
        until = time.monotonic() + 2 * TIMEOUT_S
        while time.monotonic() < until:
            report = self.stores[i].take_report("receive", NUM_SENDERS + rank)
            if report is not None:
                return report
            time.sleep(0.005)
        raise AssertionError(f"rank {rank} of engine {i} did not report")

    def _link(self, i: int, store: LinkStore) -> Link:
        return Link(
            f"engine-{i}",
            "127.0.0.1",
            store.port,
            NUM_SENDERS,
            NUM_RANKS,
            700,
            TIMEOUT_S,
            staged=True,
        )

    def _make(
        self, end: LinkEnd, shared_words: Mapping[int, int], stream: DeviceStream
    ) -> Transport:
        transport = self._make_transport(end, shared_words, stream)
        fault = self._faults.get((end.link.relay, end.link.engine))
        if fault is None or fault.rank != end.rank:
            return transport
        return FaultyTransport(transport, fault)


@contextmanager
def chain_of(
    num_engines: int,
    make_transport: MakeTransport = make_routed_transport,
    faults: Faults | None = None,
) -> Iterator[Chain]:
    with ThreadPoolExecutor(16) as pool:
        chain = Chain(pool, num_engines, make_transport, {} if faults is None else faults)
        try:
            yield chain
        finally:
            chain.close()


def in_a_row(version: int, *relays: Link) -> dict[int, StageRequest]:
    """Each engine passes on what it gets."""
    links = [None, *relays, None]
    return {i: StageRequest(version, links[i], links[i + 1]) for i in range(len(relays) + 1)}


def errors(reports: Sequence[Report]) -> list[str | None]:
    return [report.error for report in reports]


@pytest.mark.parametrize(
    "make_transport",
    [make_routed_transport, make_gloo_transport],
    ids=["one machine", "between machines"],
)
def test_every_engine_of_a_chain_gets_every_version_and_the_trainer_sends_one_copy(
    make_transport: MakeTransport,
) -> None:
    with chain_of(3, make_transport) as chain:
        first, second = chain.relay(0), chain.relay(1)
        for version in range(3):
            orders = {
                0: StageRequest(version, None, first),
                1: StageRequest(version, first, second),
                2: StageRequest(version, second),
            }
            received, sent = chain.move(version, orders)
            for i in range(3):
                assert errors(received[i]) == [None, None]
                chain.swap(i, version)
            assert [set(reports) for reports in sent] == [{"engine-0"}] * NUM_SENDERS
            copies = [sum(report.num_bytes for report in reports) for reports in received.values()]
            assert len(set(copies)) == 1
            assert sum(reports["engine-0"].num_bytes for reports in sent) == copies[0] > 0
        keys = [store.num_keys for store in chain.stores + chain.relay_stores]
        chain.move(3, in_a_row(3, first, second))
        assert [store.num_keys for store in chain.stores + chain.relay_stores] <= [
            k + 1 for k in keys
        ]


def test_a_byte_changed_between_engines_fails_only_the_engines_behind() -> None:
    faults = {("engine-0", "engine-1"): Fault(rank=1, message=2, kind="corrupt")}
    with chain_of(3, faults=faults) as chain:
        first, second = chain.relay(0), chain.relay(1)
        received, _ = chain.move(1, in_a_row(1, first, second))
        assert errors(received[0]) == [None, None]
        chain.swap(0, 1)
        assert any(error and "has checksum" in error for error in errors(received[1]))
        assert any(error and "cannot be forwarded" in error for error in errors(received[2]))
        assert max(report.seconds for report in received[2]) < TIMEOUT_S / 2

        received, _ = chain.move(1, {1: StageRequest(1), 2: StageRequest(1)})
        assert errors(received[1] + received[2]) == [None] * 2 * NUM_RANKS
        faults.clear()
        first, second = chain.relay(0), chain.relay(1)
        received, _ = chain.move(
            2,
            {
                0: StageRequest(2, None, first),
                1: StageRequest(2, first, second),
                2: StageRequest(2, second),
            },
        )
        for i in range(3):
            assert errors(received[i]) == [None, None]
            chain.swap(i, 2)


def test_a_fault_before_the_first_engine_is_heard_of_at_once_by_those_behind() -> None:
    faults = {("", "engine-0"): Fault(rank=1, message=2, kind="corrupt")}
    with chain_of(2, faults=faults) as chain:
        relay = chain.relay(0)
        began_s = time.monotonic()
        received, _ = chain.move(1, in_a_row(1, relay))
        assert time.monotonic() - began_s < TIMEOUT_S / 2
        assert any(error and "has checksum" in error for error in errors(received[0]))
        assert any(error and "cannot be forwarded" in error for error in errors(received[1]))
        received, _ = chain.move(1, {1: StageRequest(1)})
        assert errors(received[1]) == [None, None]
        chain.swap(1, 1)


def test_padding_travels_as_zeros_so_that_sums_stay_true_when_passed_on() -> None:
    stale = torch.full((10_000,), 7, dtype=torch.int64)

    def make_dirty(
        end: LinkEnd, shared_words: Mapping[int, int], stream: DeviceStream
    ) -> Transport:
        transport = make_routed_transport(end, shared_words, stream)
        for peer in shared_words if end.is_sender else ():
            memory = transport.memory(peer)
            assert memory is not None
            memory.copy_(stale[: len(memory)])
        return transport

    with chain_of(2, make_dirty) as chain:
        relay = chain.relay(0)
        received, _ = chain.move(1, in_a_row(1, relay))
        assert errors(received[0] + received[1]) == [None] * 2 * NUM_RANKS
        chain.swap(1, 1)


def test_links_that_are_gone_leave_neither_memory_nor_descriptors() -> None:
    def move_once() -> None:
        with chain_of(2) as chain:
            relay = chain.relay(0)
            assert errors(chain.move(1, in_a_row(1, relay))[0][1]) == [None, None]
            assert num_segments() > 0

    def left(at_most: tuple[int, int] | None = None) -> tuple[int, int]:
        until = time.monotonic() + 10
        while True:
            gc.collect()
            found = num_segments(), len(os.listdir("/proc/self/fd"))
            if time.monotonic() > until or (at_most is None and found[0] == 0) or found == at_most:
                return found
            time.sleep(0.1)

    move_once()
    before = left()
    assert before[0] == 0
    for _ in range(2):
        move_once()
    after = left(before)
    assert after[0] == 0
    assert after[1] <= before[1]


def num_segments() -> int:
    """Mappings of memory that ranks share."""
    return Path("/proc/self/maps").read_text().count("mcore_rl_weights")
