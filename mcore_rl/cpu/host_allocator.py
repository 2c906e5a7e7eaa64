"""Keeps the host memory that this process frees, for its next allocations."""

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Parameters of mallopt, from glibc's malloc.h."""
_NEVER = -1
_PAD_BYTES = 64 << 20


def keep_freed_memory() -> None:
    """Stop glibc's malloc from returning memory to the system; do nothing without glibc.

    A training step frees tensors of many megabytes and asks for as many again. By default each is
    mapped anew, and the kernel fills every page with zeros first: a quarter of the time of a step
    of SmolLM2-135M. The process stays as large as its largest step made it.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(_MMAP_MAX, 0)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    libc.mallopt(_TOP_PAD, _PAD_BYTES)
