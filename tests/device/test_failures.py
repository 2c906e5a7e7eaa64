"""Which errors, as torch raises them, are of hardware or network, and which are the program's."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

from mcore_rl.cluster.rank_actor import RankActor, summarize_error
from mcore_rl.device.failures import Failure, find_failure

HashStore: Any = dist.HashStore  # pyright: ignore[reportPrivateImportUsage]
TCPStore: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
HELP = "\nCUDA kernel errors might be asynchronously reported at some other API call"
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, {}, NCCL version 2.27"
ERRORS = {
    "uncorrectable ECC error encountered": Failure.HARDWARE,
    "uncorrectable NVLink error detected during the execution": Failure.HARDWARE,
    "no CUDA-capable device is detected": Failure.HARDWARE,
    "unspecified launch failure": Failure.DOUBTFUL,
    "an illegal memory access was encountered": Failure.DOUBTFUL,
    "unknown error": Failure.DOUBTFUL,
    "device-side assert triggered": None,
    "out of memory": None,
    "invalid argument": None,
    "no kernel image is available for execution on the device": None,
}
RAISED = [(torch.AcceleratorError(f"CUDA error: {said}{HELP}"), ERRORS[said]) for said in ERRORS]
RAISED += [
    (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `x`"), Failure.DOUBTFUL),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), None),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), None),
    (
        dist.DistBackendError(
            NCCL.format("remote process exited or there was a network error")
            + "\nncclRemoteError: A call failed possibly due to a network error"
        ),
        Failure.LOST_PEER,
    ),
    (
        dist.DistBackendError(NCCL.format("unhandled system error") + "\nncclSystemError: a call"),
        Failure.HARDWARE,
    ),
    (
        dist.DistBackendError(
            NCCL.format("unhandled cuda error")
            + "\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
            "Cuda failure 2 'out of memory'"
        ),
        None,
    ),
    (
        dist.DistBackendError(NCCL.format("invalid usage") + "\nncclInvalidUsage: a wrong call"),
        None,
    ),
    (dist.DistNetworkError("the server socket did not answer"), Failure.LOST_PEER),
    (
        RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1"),
        Failure.LOST_PEER,
    ),
    (ValueError("the label 7 ends in an unknown error"), None),
]


class Raising:
    """Raises an error as ranks do: from another one."""

    def __init__(self, cause: Exception) -> None:
        self._cause = cause

    def fail(self) -> None:
        raise self._cause

    def wrap(self) -> None:
        try:
            raise self._cause
        except Exception as cause:
            raise RuntimeError("the step failed") from cause


@pytest.mark.parametrize(
    ("error", "wanted"), RAISED, ids=[str(error).splitlines()[-1][:40] for error, _ in RAISED]
)
@pytest.mark.parametrize("method", ["fail", "wrap"])
def test_what_a_rank_raises_says_what_failed(
    error: Exception, wanted: Failure | None, method: str
) -> None:
    actor = RankActor.__new__(RankActor)
    actor._worker = Raising(error)
    raised = actor.call(60.0, method)
    assert find_failure([raised.summary, *raised.causes]) is wanted


def test_what_torch_raises_without_a_peer_is_known() -> None:
    with pytest.raises(dist.DistStoreError) as late:
        HashStore().wait(["never"], timedelta(seconds=0.01))
    with pytest.raises(dist.DistNetworkError) as lost:
        TCPStore("127.0.0.1", 9, is_master=False, timeout=timedelta(seconds=0.1))
    for error in (late.value, lost.value):
        assert find_failure([summarize_error(error)]) is Failure.LOST_PEER, error
