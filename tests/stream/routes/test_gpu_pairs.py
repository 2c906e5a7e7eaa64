"""Pairs that meet over NCCL. tests/scenarios/stream/test_gpu_sync.py tests them on GPUs."""

import time
from dataclasses import replace

import pytest
import torch

from mcore_rl.device import has_cuda
from mcore_rl.stream.routes.gpu_pairs import GpuPairTransport
from mcore_rl.stream.routes.transport import TransferError
from tests.support.link_ends import make_link, open_ends


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
