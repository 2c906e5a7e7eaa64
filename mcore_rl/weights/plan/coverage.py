"""Checks that shards and padding cover every element of every local tensor exactly once.

    element   0         24        48        60    64
    accepted  | shard A | shard B | shard C | pad |
    refused   | shard A | shard B |         | pad |    element 48 is not covered
    refused   | shard A | shard B | shard C | pad |
                                          | shard D    element 56 is covered twice

A shard that is not contiguous counts as its contiguous runs.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from mcore_rl.weights.box import Padding, Shard


def runs(
    shape: Iterable[int], strides: Iterable[int], offset: int = 0
) -> tuple[NDArray[np.int64], int]:
    """Return the contiguous runs of a strided view: their first elements and their common length.

    The first elements are int64 [number of runs], not sorted; `offset` is the view's first element.
    """
    axes = sorted(((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1))
    run_len = 1
    while axes and axes[0][0] == run_len:
        run_len *= axes.pop(0)[1]
    starts = np.array([offset], dtype=np.int64)
    for stride, size in axes:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    return starts, run_len


def check_coverage(
    shards: Iterable[Shard], padding: Iterable[Padding], numels: Mapping[str, int]
) -> None:
    """Check that every element of every local tensor lies in exactly one shard or piece of padding.

    numels   local tensor -> number of elements

    Raises ValueError naming the tensor, its first element that does not, and the HF tensors nearby.
    Peak memory: about 50 bytes per contiguous run of one tensor.
    """
    pieces: dict[str, list[tuple[NDArray[np.int64], int, str]]] = {name: [] for name in numels}
    for shard in shards:
        _pieces_of(pieces, shard.tensor).append(
            (*runs(shard.box.shape, shard.strides, shard.offset), shard.box.name)
        )
    padded: dict[tuple[str, int], list[NDArray[np.int64]]] = defaultdict(list)
    for part in padding:
        starts, run_len = runs(part.shape, part.strides, part.offset)
        padded[part.tensor, run_len].append(starts)
    for (tensor, run_len), starts in padded.items():
        # A loader may set the same padding several times, once per HF tensor beside it.
        _pieces_of(pieces, tensor).append((np.unique(np.concatenate(starts)), run_len, "padding"))
    for name, numel in numels.items():
        _check_tiling(name, numel, pieces[name])


def _pieces_of(
    pieces: dict[str, list[tuple[NDArray[np.int64], int, str]]], tensor: str
) -> list[tuple[NDArray[np.int64], int, str]]:
    if tensor not in pieces:
        raise ValueError(f"a shard lies in local tensor {tensor!r}, which does not exist")
    return pieces[tensor]


def _check_tiling(name: str, numel: int, pieces: list[tuple[NDArray[np.int64], int, str]]) -> None:
    if not pieces:
        raise ValueError(f"local tensor {name!r} is not covered: no HF tensor is loaded into it")
    starts = np.concatenate([first for first, _, _ in pieces])
    stops = np.concatenate([first + run_len for first, run_len, _ in pieces])
    order = np.argsort(starts, kind="stable")
    edges = np.concatenate([[0], stops[order]])
    follows = np.concatenate([starts[order], [numel]])
    # Tiling without gaps: every run begins where the one before it ends.
    wrong = np.flatnonzero(edges != follows)
    if wrong.size == 0:
        return
    at = int(wrong[0])
    element = int(min(edges[at], follows[at]))
    problem = "not covered"
    if edges[at] > follows[at]:
        problem = "covered twice or lies outside the tensor"
    owners = np.concatenate([np.full(len(first), i) for i, (first, _, _) in enumerate(pieces)])
    owners = owners[order]
    nearby = dict.fromkeys(pieces[owners[i]][2] for i in (at - 1, at) if 0 <= i < len(owners))
    raise ValueError(
        f"local tensor {name!r}: element {element} of {numel} is {problem}"
        f" (near {', '.join(nearby)})"
    )
