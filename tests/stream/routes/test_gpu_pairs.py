"""Meeting over NCCL where that is not possible; where it is, test_gpu.py tests it."""

import time

import pytest
import torch

from mcore_rl.device import has_cuda
from mcore_rl.stream.link_store import LinkStore
from mcore_rl.stream.routes.gpu_pairs import GpuPairTransport
from mcore_rl.stream.routes.transport import TransferError
from mcore_rl.stream.wire import Link


@pytest.mark.skipif(has_cuda(), reason="there is a GPU")
def test_a_peer_that_cannot_be_met_is_named_at_once() -> None:
    store = LinkStore.serve("127.0.0.1", 30.0)
    link = Link("engine-0", "127.0.0.1", store.port, 1, 1, 1 << 20, 30.0)
    began_s = time.monotonic()
    with pytest.raises(
        TransferError,
        match=r"trainer rank 0 waited .* for rank 0 of engine engine-0 to meet it over NCCL: .*GroupNCCL",
    ):
        GpuPairTransport(store, 0, link, [1], torch.device("cpu"), began_s + 30)
    assert time.monotonic() - began_s < 10
