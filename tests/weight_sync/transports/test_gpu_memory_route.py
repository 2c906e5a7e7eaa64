"""GPU memory that two ranks share is tried when they link, and lent on when a receiver is gone.

No CPU has memory with CUDA's handles, so tensors of torch's device "meta" stand for it: they have
sizes and no bytes. tests/scenarios/weight_sync/test_gpu_sync.py tests the bytes on GPUs.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import DeviceStream, LentMemory
from mcore_rl.weight_sync.buckets import plan_buckets
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.placed_bucket import RankBucket
from mcore_rl.weight_sync.plan_handshake import RankPlan
from mcore_rl.weight_sync.roster import RankFacts, make_roster
from mcore_rl.weight_sync.transports import shared_memory
from mcore_rl.weight_sync.transports.gpu_pairs import GpuPairTransport
from mcore_rl.weight_sync.transports.select import RoutedTransport, select_transport
from mcore_rl.weight_sync.transports.shared_memory import (
    Channel,
    SegmentSpec,
    fetch_channels,
    serve_segments,
)
from mcore_rl.weight_sync.verify import ROWS
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weights.box import Box
from mcore_rl.weights.plan.shared_region import Slice
from tests.support.link_ends import make_link, open_ends, run_ranks

GPU = torch.device("meta")
SEGMENT = SegmentSpec(8, GPU)


class Cuda:
    """Stands for CUDA's handles of memory: `exported` are the storages that were shared."""

    def __init__(self) -> None:
        self.exported: list[int] = []
        self.can_export = True
        self.opening: Exception | None = None
        """Raised when memory is opened."""

    def export(self, words_W: Tensor) -> bytes:
        if not self.can_export:
            raise RuntimeError("invalid argument\nCompile with TORCH_USE_CUDA_DSA")
        self.exported.append(words_W.untyped_storage()._cdata)
        return b"a handle"

    def open(self, handle: bytes, device: torch.device) -> Tensor:
        assert handle == b"a handle"
        if self.opening is not None:
            raise self.opening
        return torch.empty(12, dtype=torch.int64, device=device)  # the whole block


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(shared_memory, "export_memory", cuda.export)
    monkeypatch.setattr(shared_memory, "open_memory", lambda *given: cuda.open(*given))
    monkeypatch.setattr(shared_memory, "LENT", LentMemory())
    return cuda


@pytest.fixture
def ends() -> Iterator[list[LinkEnd]]:
    """Those of a trainer rank and an engine rank, whose tensors are on GPUs."""
    _store, link = make_link(timeout_s=10)
    yield [replace(end, device=GPU) for end in open_ends(replace(link, staged=True))]


def open_channel(ends: list[LinkEnd]) -> tuple[Channel | None, Channel | None]:
    """The sender's end of a channel and the receiver's."""
    acts: list[Callable[[], Channel | None]] = [
        lambda: serve_segments(ends[0], {1: SEGMENT}).get(1),
        lambda: fetch_channels(ends[1], {0: SEGMENT}).get(0),
    ]
    sender, receiver = run_ranks(acts)
    return sender, receiver


def test_a_receiver_sees_the_words_of_the_plan_in_a_longer_block(
    cuda: Cuda, ends: list[LinkEnd]
) -> None:
    sender, receiver = open_channel(ends)
    assert sender is not None and receiver is not None
    assert len(sender.words_W) == len(receiver.words_W) == 8
    sender.advance()
    assert receiver.wait(1, 5)


def test_memory_of_a_receiver_that_is_gone_is_lent_to_its_successor(
    cuda: Cuda, ends: list[LinkEnd]
) -> None:
    held = open_channel(ends)
    other = open_channel(ends)
    assert held[0] is not None and other[0] is not None
    assert len(set(cuda.exported)) == 2, "two links share memory"
    held[0].close()  # the receiver was killed: it closes nothing
    open_channel(ends)
    assert cuda.exported[2] == cuda.exported[0]


def test_memory_that_cannot_be_opened_is_told_once_and_lent_to_others(
    cuda: Cuda, ends: list[LinkEnd], caplog: pytest.LogCaptureFixture
) -> None:
    cuda.opening = RuntimeError("pidfd_getfd: Operation not permitted\nSee the manual")
    with caplog.at_level(logging.WARNING):
        assert open_channel(ends) == (None, None)
    assert caplog.messages == [
        "rank 0 of engine engine-0 cannot open GPU memory of trainer rank 0: pidfd_getfd: Operation"
        " not permitted"
    ]
    cuda.opening = None
    assert None not in open_channel(ends)
    assert len(set(cuda.exported)) == 1


def test_memory_that_cannot_be_exported_is_told_once(
    cuda: Cuda, ends: list[LinkEnd], caplog: pytest.LogCaptureFixture
) -> None:
    cuda.can_export = False
    with caplog.at_level(logging.WARNING):
        assert open_channel(ends) == (None, None)
    assert caplog.messages == ["trainer rank 0 cannot share GPU memory: invalid argument"]
    cuda.can_export = True
    assert None not in open_channel(ends)


def test_a_receiver_that_ends_before_it_answers_is_named(cuda: Cuda, ends: list[LinkEnd]) -> None:
    cuda.opening = ConnectionResetError("killed")

    def fetch() -> None:
        with pytest.raises(TransferError, match="no shared memory from trainer rank 0: killed"):
            fetch_channels(ends[1], {0: SEGMENT})

    acts: list[Callable[[], object]] = [lambda: serve_segments(ends[0], {1: SEGMENT}), fetch]
    with pytest.raises(
        TransferError,
        match=r"trainer rank 0 waited .* for rank 0 of engine engine-0 to open its GPU memory: the",
    ):
        run_ranks(acts)
    assert shared_memory.LENT.take(8, GPU).untyped_storage()._cdata == cuda.exported[0]


def select_both(ends: list[LinkEnd], gpus: tuple[str, str]) -> list[RoutedTransport]:
    """The transports of both ranks, on these GPUs, each of which the other can read."""
    facts = [RankFacts("machine", (ROWS,), gpu, ("gpu-0", "gpu-1")) for gpu in gpus]
    roster = make_roster(facts, ends[0].link)
    (bucket,) = plan_buckets({(0, 0): [Slice(Box("w", (0,), (8,)), "float32")]}, 1, 700)

    def select(end: LinkEnd) -> RoutedTransport:
        plan = RankPlan("", [RankBucket(bucket, 1 - end.rank, ())], ROWS, {})
        return select_transport(replace(end, roster=roster), plan, DeviceStream(GPU))

    return run_ranks([lambda end=end: select(end) for end in ends])


def test_ranks_whose_memory_cannot_be_opened_take_nccl_and_say_so(
    cuda: Cuda, ends: list[LinkEnd], caplog: pytest.LogCaptureFixture
) -> None:
    cuda.opening = RuntimeError("invalid resource handle")
    with caplog.at_level(logging.INFO):
        transports = select_both(ends, ("gpu-0", "gpu-1"))
    for rank, transport in enumerate(transports):
        assert isinstance(transport._by_peer[1 - rank], GpuPairTransport)
        assert transport.message(0, 1 - rank) is None and transport.device(1 - rank) == GPU
    assert sorted(line for line in caplog.messages if line.startswith("weights take")) == [
        "weights take NCCL between rank 0 of engine engine-0 and trainer rank 0: the memory cannot"
        " be opened",
        "weights take NCCL between trainer rank 0 and rank 0 of engine engine-0: the memory cannot"
        " be opened",
    ]


def test_ranks_that_can_open_it_share_memory_and_say_so(
    cuda: Cuda, ends: list[LinkEnd], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        transports = select_both(ends, ("gpu-0", "gpu-0"))
    assert len(cuda.exported) == 1 and transports[0].message(0, 1) is not None
    assert (
        "weights take shared GPU memory between trainer rank 0 and rank 0 of engine engine-0"
        in caplog.messages
    )


def test_two_ranks_of_one_gpu_are_refused_as_nccl_cannot_join_them(
    cuda: Cuda, ends: list[LinkEnd]
) -> None:
    cuda.opening = RuntimeError("invalid resource handle")
    with pytest.raises(TransferError, match=r"share GPU gpu-0, .*cluster\.colocated=false"):
        select_both(ends, ("gpu-0", "gpu-0"))
