"""Trainer ranks and a chain of engines in threads of this process; tests play the controller."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.tools.doctor.sync_ranks import FaultyTransport
from mcore_rl.tools.doctor.toy_engine import Fault, FusedEngine, expert_cut, make_tensors
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.plan_handshake import RankPlan
from mcore_rl.weight_sync.receiver import WeightReceiver
from mcore_rl.weight_sync.sender import WeightSender
from mcore_rl.weight_sync.transports.select import MakeTransport, select_transport
from mcore_rl.weight_sync.transports.transport import Transport
from mcore_rl.weight_sync.wire import Action, Command, Link, Report, StageRequest

NUM_SENDERS = 2
NUM_RANKS = 2
"""Ranks of each engine."""
TIMEOUT_S = 20.0

Faults = Mapping[tuple[str, str], Fault]
"""(relay or "" for trainer ranks, engine) of a link -> a fault of the sender of that rank."""


class EngineChain:
    """Trainer ranks and engines of equal layouts, each linked to the trainer ranks."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        num_engines: int,
        make_transport: MakeTransport,
        faults: Faults,
    ) -> None:
        self._pool = pool
        self._make_transport = make_transport
        self._faults = faults
        self.stores = [LinkStore.serve("127.0.0.1", TIMEOUT_S) for _ in range(num_engines)]
        self.links = [_make_link(i, store) for i, store in enumerate(self.stores)]
        for store, link in zip(self.stores, self.links, strict=True):
            store.keep(link)
        self.relay_stores: list[LinkStore] = []
        self._senders = []
        self._sources = []
        for rank in range(NUM_SENDERS):
            shards, tensors = expert_cut(make_tensors(seed=0), rank, NUM_SENDERS, "float32")
            self._sources.append(tensors)
            self._senders.append(WeightSender(shards, tensors, rank, self._make))
        self.engines = []
        self._receivers = []
        for _ in range(num_engines):
            self.engines.append(
                [FusedEngine(rank, NUM_RANKS, torch.float32) for rank in range(NUM_RANKS)]
            )
            self._receivers.append([WeightReceiver(self._make) for _ in range(NUM_RANKS)])
        self._num_requests = [0] * num_engines
        for i, link in enumerate(self.links):
            sending = [pool.submit(sender.connect, link) for sender in self._senders]
            reports = self._handle(i, "connect") + [future.result() for future in sending]
            assert [report.error for report in reports] == [None] * len(reports)

    def relay(self, i: int) -> Link:
        """A new relay link from engine `i` to the next one."""
        self.relay_stores.append(LinkStore.serve("127.0.0.1", TIMEOUT_S))
        store = self.relay_stores[-1]
        link = replace(
            self.links[i + 1],
            store_port=store.port,
            store_key=store.key,
            num_senders=NUM_RANKS,
            relay=f"engine-{i}",
        )
        store.keep(link)
        return link

    def move(
        self, version: int, requests: Mapping[int, StageRequest]
    ) -> tuple[dict[int, list[Report]], list[dict[str, Report]]]:
        """Move the weights of `version` to the engines with requests.

        Returns engine -> reports of its ranks, and the reports of each trainer rank, which send to
        the engines that have no relay.
        """
        for rank, tensors in enumerate(self._sources):
            newer = expert_cut(make_tensors(seed=version), rank, NUM_SENDERS, "float32")[1]
            for name, tensor in tensors.items():
                tensor.copy_(newer[name])
        heads = [
            self.links[i].engine for i, request in requests.items() if request.receive_link is None
        ]
        sending = [self._pool.submit(s.send, version, heads, TIMEOUT_S) for s in self._senders]
        for i, request in requests.items():
            self.stores[i].put_stage_request(self._num_requests[i], request)
            self._num_requests[i] += 1
        received = {i: [self._report(i, rank) for rank in range(NUM_RANKS)] for i in requests}
        return received, [future.result() for future in sending]

    def swap(self, i: int, version: int) -> None:
        """Swap `version` in on engine `i` and check every parameter."""
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
        until_s = time.monotonic() + 2 * TIMEOUT_S
        while time.monotonic() < until_s:
            report = self.stores[i].take_report("receive", NUM_SENDERS + rank)
            if report is not None:
                return report
            time.sleep(0.005)
        raise AssertionError(f"rank {rank} of engine {i} did not report")

    def _make(self, end: LinkEnd, plan: RankPlan, stream: DeviceStream) -> Transport:
        transport = self._make_transport(end, plan, stream)
        fault = self._faults.get((end.link.relay, end.link.engine))
        if fault is None or fault.rank != end.rank:
            return transport
        return FaultyTransport(transport, plan, fault)


@contextmanager
def open_chain(
    num_engines: int,
    make_transport: MakeTransport = select_transport,
    faults: Faults | None = None,
) -> Iterator[EngineChain]:
    with ThreadPoolExecutor(16) as pool:
        chain = EngineChain(pool, num_engines, make_transport, {} if faults is None else faults)
        try:
            yield chain
        finally:
            chain.close()


def chain_requests(version: int, *relays: Link) -> dict[int, StageRequest]:
    """A request to each engine of a chain, which forwards what it receives over `relays`."""
    links = [None, *relays, None]
    return {i: StageRequest(version, links[i], links[i + 1]) for i in range(len(relays) + 1)}


def errors(reports: Sequence[Report]) -> list[str | None]:
    return [report.error for report in reports]


def _make_link(i: int, store: LinkStore) -> Link:
    return Link(
        engine=f"engine-{i}",
        store_host="127.0.0.1",
        store_port=store.port,
        store_key=store.key,
        num_senders=NUM_SENDERS,
        num_receivers=NUM_RANKS,
        bucket_bytes=700,
        timeout_s=TIMEOUT_S,
        staged=True,
    )
