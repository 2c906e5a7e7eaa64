"""Says of the words of an error whether hardware, the network or another rank failed.

Sources of the words: CUDA Runtime API, "Data types", cudaError, and cudaGetErrorString; the NCCL
documentation, "Types", ncclResult_t; torch's c10/cuda/CUDAException.cpp. HIP has CUDA's words.
"""

import re
from collections.abc import Iterable
from enum import Enum


class Failure(Enum):
    """The part that kept a rank from its work, if not its program.

    LOST_PEER   another rank is gone, or did not come to a collective in time
    HARDWARE    a GPU, its links or the network failed: other processes may do the same work
    DOUBTFUL    a kernel failed, because of its GPU or its program. A program fails once more when
                the same work is done again
    """

    LOST_PEER = "lost peer"
    HARDWARE = "hardware"
    DOUBTFUL = "doubtful"


_RAISED = r"(?:CUDA|HIP) error: |Cuda failure (?:\d+ )?'"
"""How torch and NCCL begin what the runtime says."""
_PROGRAM = re.compile(rf"(?:{_RAISED})(?:out of memory|device-side assert)|\bOutOfMemoryError\b")
_HARDWARE = re.compile(
    rf"(?:{_RAISED})(?:uncorrectable ECC error|uncorrectable NVLink error"
    r"|CUDA-capable device\(s\) is/are busy or unavailable|no CUDA-capable device is detected"
    r"|system not yet initialized)"
    r"|\bncclSystemError\b"
)
_DOUBTFUL = re.compile(
    rf"(?:{_RAISED})(?:unspecified launch failure|an illegal memory access was encountered"
    r"|an illegal instruction was encountered|misaligned address|invalid program counter"
    r"|operation not supported on global/shared address space|hardware stack error"
    r"|Invalid access of peer GPU memory over nvlink or a hardware error|unknown error)"
    r"|\bCU(?:BLAS|DNN)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)\b"
    r"|\bnccl(?:UnhandledCuda|Internal)Error\b"
)
_LOST_PEER = re.compile(
    r"Connection (?:closed|reset) by peer|Connection timed out|No route to host"
    r"|Network is unreachable|Timed out waiting|[Ww]atchdog caught collective"
    r"|NCCL communicator was aborted|[Ss]ocket [Tt]imeout|[Bb]roken pipe|\bncclRemoteError\b"
    r"|\bDist(?:Network|Store)Error\b"
)
"""Gloo's, NCCL's and the store's words for a peer that is gone or does not come."""
_IN_ORDER = (
    (_PROGRAM, None),
    (_HARDWARE, Failure.HARDWARE),
    (_DOUBTFUL, Failure.DOUBTFUL),
    (_LOST_PEER, Failure.LOST_PEER),
)


def find_failure(errors: Iterable[str]) -> Failure | None:
    """Return what failed, by an error and those that it was raised from; None: the program.

    Too little memory and a failed assertion are of the program, whatever else the errors say.
    """
    text = "\n".join(errors)
    return next((failure for words, failure in _IN_ORDER if words.search(text)), None)
