"""Finds the beginnings that sequences share, so that a model computes them once.

    sequence 0   s a b c d e      sequence 1 begins with s a b, too, and trains f g h only
    sequence 1   s a b f g h      computed for it: b f g h, as the logits at b predict f

The samples of a prompt share its tokens, the rows of an episode those before a fork.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mcore_rl.types import Array, TrainBatch

MIN_SHARED = 4
"""Fewer common tokens are computed for each sequence."""


@dataclass(frozen=True)
class Sharing:
    """Which sequences begin with tokens of others.

    parents   of each sequence the one whose tokens it takes over; -1: none
    starts    the first token that is computed for a sequence, 0 without a parent. The parent has
              it, too: it is computed twice because its successors differ
    order     the sequences, each after its parent
    """

    parents: tuple[int, ...]
    starts: tuple[int, ...]
    order: tuple[int, ...]


def find_sharing(rows: Sequence[Array], first_trained: Sequence[int]) -> Sharing:
    """Return what sequences of these token ids share.

    first_trained   the first token that each trains, its length if it trains none. A sequence takes
                    over only tokens before it, since two sequences train them differently
    """
    order = sorted(range(len(rows)), key=lambda n: (first_trained[n], n))
    parents, starts = [-1] * len(rows), [0] * len(rows)
    earlier: dict[bytes, list[int]] = defaultdict(list)
    for n in order:
        if len(rows[n]) < MIN_SHARED:
            continue
        candidates = earlier[np.asarray(rows[n][:MIN_SHARED], np.int64).tobytes()]
        parent, num_shared = _longest(rows, n, first_trained[n], candidates)
        if num_shared >= MIN_SHARED:
            parents[n], starts[n] = parent, num_shared - 1
        candidates.append(n)
    return Sharing(tuple(parents), tuple(starts), tuple(order))


def find_batch_sharing(batch: TrainBatch) -> Sharing:
    """Return what the sequences of a batch share."""
    rows = [ids.numpy() for ids in batch.token_ids_T.split(list(batch.lens_N))]
    masks = [mask.numpy() for mask in batch.loss_mask_T.split(list(batch.lens_N))]
    return find_sharing(rows, [first_of(mask) for mask in masks])


def parents_first(parents: Sequence[int]) -> tuple[int, ...]:
    """Return the sequences in an order in which each comes after its parent."""
    depths = [0] * len(parents)
    for n, parent in enumerate(parents):
        while parent >= 0:
            depths[n] += 1
            parent = parents[parent]
    return tuple(sorted(range(len(parents)), key=lambda n: (depths[n], n)))


def first_of(mask: Array) -> int:
    """Return the index of the first True, the length if there is none."""
    return int(np.argmax(mask)) if mask.any() else len(mask)


def _longest(
    rows: Sequence[Array], n: int, most: int, candidates: Sequence[int]
) -> tuple[int, int]:
    """Return (the candidate with the longest beginning in common with row n, its tokens)."""
    best, num_shared = -1, 0
    for candidate in reversed(candidates):
        both = min(most, len(rows[n]), len(rows[candidate]))
        num_common = first_of(rows[n][:both] != rows[candidate][:both])
        if num_common > num_shared:
            best, num_shared = candidate, num_common
        if num_shared == most:
            break
    return best, num_shared
