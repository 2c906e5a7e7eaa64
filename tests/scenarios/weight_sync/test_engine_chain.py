"""The background stager: engines stage and forward by request; faults stay where they happen."""

import gc
import os
import time
from pathlib import Path

import pytest
import torch

from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.tools.doctor.toy_engine import Fault
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.plan_handshake import RankPlan
from mcore_rl.weight_sync.transports.select import (
    MakeTransport,
    make_gloo_transport,
    select_transport,
)
from mcore_rl.weight_sync.transports.transport import Transport
from mcore_rl.weight_sync.wire import StageRequest
from tests.support.engine_chain import (
    NUM_RANKS,
    NUM_SENDERS,
    TIMEOUT_S,
    chain_requests,
    errors,
    open_chain,
)

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize(
    "make_transport",
    [select_transport, make_gloo_transport],
    ids=["one machine", "between machines"],
)
def test_every_engine_of_a_chain_gets_every_version_and_the_trainer_sends_one_copy(
    make_transport: MakeTransport,
) -> None:
    with open_chain(3, make_transport) as chain:
        first = chain.relay(0)
        second = chain.relay(1)
        for version in range(3):
            received, sent = chain.move(version, chain_requests(version, first, second))
            for i in range(3):
                assert errors(received[i]) == [None, None]
                chain.swap(i, version)
            assert [set(reports) for reports in sent] == [{"engine-0"}] * NUM_SENDERS
            copies = [sum(report.num_bytes for report in reports) for reports in received.values()]
            assert len(set(copies)) == 1
            assert sum(reports["engine-0"].num_bytes for reports in sent) == copies[0] > 0
        stores = chain.stores + chain.relay_stores
        num_keys = [store.num_keys for store in stores]
        chain.move(3, chain_requests(3, first, second))
        for store, before in zip(stores, num_keys, strict=True):
            assert store.num_keys <= before + 1, "only the stage request, which nobody dropped"


def test_a_byte_changed_between_engines_fails_only_the_engines_behind() -> None:
    faults = {("engine-0", "engine-1"): Fault(rank=1, message=2, kind="corrupt")}
    with open_chain(3, faults=faults) as chain:
        first = chain.relay(0)
        second = chain.relay(1)
        received, _ = chain.move(1, chain_requests(1, first, second))
        assert errors(received[0]) == [None, None]
        chain.swap(0, 1)
        assert any(error and "has checksum" in error for error in errors(received[1]))
        assert any(error and "cannot be forwarded" in error for error in errors(received[2]))
        assert max(report.seconds for report in received[2]) < TIMEOUT_S / 2

        received, _ = chain.move(1, {1: StageRequest(1), 2: StageRequest(1)})
        assert errors(received[1] + received[2]) == [None] * 2 * NUM_RANKS
        faults.clear()
        first = chain.relay(0)
        second = chain.relay(1)
        received, _ = chain.move(2, chain_requests(2, first, second))
        for i in range(3):
            assert errors(received[i]) == [None, None]
            chain.swap(i, 2)


def test_a_fault_before_the_first_engine_is_told_at_once_to_those_behind() -> None:
    faults = {("", "engine-0"): Fault(rank=1, message=2, kind="corrupt")}
    with open_chain(2, faults=faults) as chain:
        relay = chain.relay(0)
        began_s = time.monotonic()
        received, _ = chain.move(1, chain_requests(1, relay))
        assert time.monotonic() - began_s < TIMEOUT_S / 2
        assert any(error and "has checksum" in error for error in errors(received[0]))
        assert any(error and "cannot be forwarded" in error for error in errors(received[1]))
        received, _ = chain.move(1, {1: StageRequest(1)})
        assert errors(received[1]) == [None, None]
        chain.swap(1, 1)


def test_padding_travels_as_zeros_so_that_checksums_hold_when_forwarded() -> None:
    stale = torch.full((10_000,), 7, dtype=torch.int64)

    def make_dirty(end: LinkEnd, plan: RankPlan, stream: DeviceStream) -> Transport:
        transport = select_transport(end, plan, stream)
        for number, own in enumerate(plan.buckets if end.is_sender else ()):
            memory = transport.message(number, own.peer)
            assert memory is not None
            memory.copy_(stale[: len(memory)])
        return transport

    with open_chain(2, make_dirty) as chain:
        relay = chain.relay(0)
        received, _ = chain.move(1, chain_requests(1, relay))
        assert errors(received[0] + received[1]) == [None] * 2 * NUM_RANKS
        chain.swap(1, 1)


def test_links_that_are_gone_leave_neither_memory_nor_descriptors() -> None:
    def move_once() -> None:
        with open_chain(2) as chain:
            relay = chain.relay(0)
            assert errors(chain.move(1, chain_requests(1, relay))[0][1]) == [None, None]
            assert num_segments() > 0

    def wait_left(max_descriptors: int) -> tuple[int, int]:
        """Segments and descriptors left, once there are few enough or time is up."""
        until_s = time.monotonic() + 10
        while True:
            gc.collect()
            segments = num_segments()
            descriptors = len(os.listdir("/proc/self/fd"))
            if time.monotonic() > until_s or (segments == 0 and descriptors <= max_descriptors):
                return segments, descriptors
            time.sleep(0.1)

    move_once()
    segments, descriptors = wait_left(max_descriptors=10_000)
    assert segments == 0
    for _ in range(2):
        move_once()
    segments_after, descriptors_after = wait_left(descriptors)
    assert segments_after == 0
    assert descriptors_after <= descriptors


def num_segments() -> int:
    """Segments mapped into this process that ranks share."""
    return Path("/proc/self/maps").read_text().count("mcore_rl_weights")
