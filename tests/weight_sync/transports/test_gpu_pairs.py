"""Pairs that meet over NCCL. tests/scenarios/weight_sync/test_gpu_sync.py tests them on GPUs."""

import time
from dataclasses import replace
from datetime import timedelta
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, distributed

from mcore_rl.device import has_cuda
from mcore_rl.weight_sync.transports import gpu_pairs
from mcore_rl.weight_sync.transports.gpu_pairs import GpuPairTransport, order_meetings
from mcore_rl.weight_sync.waits import TransferError
from tests.support.link_ends import make_link, open_ends, run_ranks

Pair = tuple[int, int]


@pytest.mark.skipif(has_cuda(), reason="there is a GPU")
def test_pairs_of_a_staged_link_meet_with_their_first_message() -> None:
    _store, link = make_link(timeout_s=30.0)
    end = open_ends(replace(link, staged=True))[0]
    transport = GpuPairTransport(end, [1])  # waits for nobody
    message_u8 = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(TransferError, match=r"rank 0 of engine engine-0 to meet it over NCCL: "):
        transport.send(message_u8, 1, "a bucket")


@pytest.mark.skipif(has_cuda(), reason="there is a GPU")
def test_a_peer_that_cannot_be_met_is_named_at_once() -> None:
    _store, link = make_link(timeout_s=30.0)
    began_s = time.monotonic()
    with pytest.raises(
        TransferError,
        match=r"trainer rank 0 waited .* for rank 0 of engine engine-0 to meet it over NCCL: "
        r".*GroupNCCL",
    ):
        GpuPairTransport(open_ends(link)[0], [1])
    assert time.monotonic() - began_s < 10


def test_messages_of_a_pair_arrive_in_order_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pairs, "make_group", GlooGroup)
    _store, link = make_link(timeout_s=30.0)
    ends = open_ends(replace(link, staged=True))
    sender, receiver = (GpuPairTransport(end, [1 - end.rank]) for end in ends)
    sent = [torch.arange(8, dtype=torch.uint8) + 8 * number for number in range(3)]
    received = [torch.zeros(8, dtype=torch.uint8) for _ in sent]

    def move(transport: GpuPairTransport, messages: list[Tensor], verb: str, peer: int) -> None:
        for number, message_u8 in enumerate(messages):
            getattr(transport, verb)(message_u8, peer, f"bucket {number}")
        transport.run(time.monotonic() + 20, lambda: None)

    run_ranks([lambda: move(sender, sent, "send", 1), lambda: move(receiver, received, "recv", 0)])
    assert [message_u8.tolist() for message_u8 in received] == [
        [*range(8)],
        [*range(8, 16)],
        [*range(16, 24)],
    ]
    for transport in (sender, receiver):
        transport.close()


class GlooGroup:
    """Stands for a pair's group of NCCL, which needs a GPU for each rank; carries bytes by gloo."""

    def __init__(self, store: Any, rank: int, size: int, max_ctas: int | None = None) -> None:
        assert max_ctas is not None, "a pair would take a GPU from decoding"
        self._group: Any = distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> "GlooWork":
        return GlooWork(self._group.send(tensors, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> "GlooWork":
        return GlooWork(self._group.recv(tensors, peer, tag))

    def abort(self) -> None: ...


class GlooWork:
    """An operation that can be polled, as NCCL's can and gloo's cannot."""

    def __init__(self, work: Any) -> None:
        self._thread = Thread(target=work.wait, daemon=True)
        self._thread.start()

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def exception(self) -> None: ...

    def synchronize(self) -> None: ...


def rounds_until_all_have_met(num_senders: int, num_receivers: int, pairs: set[Pair]) -> int:
    """Return how often all pairs that wait for each other meet at once, until none is left."""
    waiting = {}
    for rank in range(num_senders + num_receivers):
        peers = [sum(pair) - rank for pair in pairs if rank in pair]
        waiting[rank] = order_meetings(rank, peers, num_senders, num_receivers)
    num_rounds = 0
    while any(waiting.values()):
        met = [
            (rank, peers[0])
            for rank, peers in waiting.items()
            if peers and waiting[peers[0]][:1] == [rank]
        ]
        assert met, "ranks wait for each other in a ring"
        for rank, _ in met:
            waiting[rank].pop(0)
        num_rounds += 1
    return num_rounds


@pytest.mark.parametrize(("num_senders", "num_receivers"), [(1, 4), (4, 1), (3, 5), (16, 32)])
def test_pairs_meet_in_as_many_rounds_as_a_rank_has_peers(
    num_senders: int, num_receivers: int
) -> None:
    pairs = {(s, num_senders + r) for s in range(num_senders) for r in range(num_receivers)}
    rounds = rounds_until_all_have_met(num_senders, num_receivers, pairs)
    assert rounds == max(num_senders, num_receivers)


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_ranks_never_wait_in_a_ring(
    num_senders: int, num_receivers: int, data: st.DataObject
) -> None:
    every = [(s, num_senders + r) for s in range(num_senders) for r in range(num_receivers)]
    pairs = data.draw(st.sets(st.sampled_from(every)))
    rounds = rounds_until_all_have_met(num_senders, num_receivers, pairs)
    assert rounds <= max(num_senders, num_receivers)
