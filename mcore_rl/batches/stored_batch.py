"""Makes batches of samples that lie in stores, from what the controller knows of them.

Their arrays are numpy's: such a batch is sent to ranks, and torch pickles small tensors slowly.
Advantages are computed by parts of a step: whole prompts that mostly lie in the same store.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from mcore_rl.algo.aggregation import sequence_weights
from mcore_rl.batches.batch import rows_of_samples
from mcore_rl.batches.shared_prefixes import MIN_SHARED, Sharing, parents_first
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.types import (
    CUT_OFF,
    Array,
    StoredBatch,
    StoredColumn,
    StoredSample,
    WeightVersion,
    list_ends,
)

ROUTED_EXPERTS = StoredColumn("routed_experts")
INDEXER_TOPK = StoredColumn("indexer_topk")
OF_EPISODES = {
    name: StoredColumn(name[:-2]) for name in ("loss_mask_T", "turn_rewards_T", "turn_T")
}
"""Fields that only rows of episodes have."""
_BY_SEQUENCE = (
    "store_N",
    "group_N",
    "index_N",
    "sampled_lens_N",
    "parent_N",
    "start_N",
    "sample_N",
    "is_trained_N",
    "loss_weights_N",
    "advantages_N",
    "nums_images_N",
)
PART_TOKENS = 1 << 20
"""Tokens of a part, prompts included; the samples of a prompt stay together even if they are more.

Advantages take about 100 bytes of memory per token.
"""


@dataclass(frozen=True)
class StepPart:
    """Samples of a step: their places among its samples, rising, and the batch of their rows."""

    places: tuple[int, ...]
    batch: StoredBatch


def make_stored_batch(
    samples: Sequence[StoredSample], version: WeightVersion | None = None
) -> StoredBatch:
    """Lay prompt and response of each sample, or the rows of each episode, end to end.

    Responses are trained on. Samples without a response token are left out. Raises ValueError if
    no sample has one.

    version   weights that are trained; tokens sampled from other weights are marked stale. None: no
              marks
    """
    present = [sample for sample in samples if sample.response_len]
    if not present:
        ends = list_ends(samples)
        raise ValueError(f"all {len(samples)} samples are empty ({ends}): no token to train on")
    sequences = [(n, sample.lease, row) for n, sample in enumerate(present) for row in sample.rows]
    parents, starts = _find_parents(present)
    has_experts = all(sample.has_experts for sample in present)
    has_indexer_topk = all(sample.has_indexer_topk for sample in present)
    are_episodes = any(sample.episode_rows for sample in present)
    nums_images = [row.num_images for _, _, row in sequences]
    batch = StoredBatch(
        store_N=np.array([lease.store for _, lease, _ in sequences]),
        group_N=np.array([lease.group for _, lease, _ in sequences]),
        index_N=np.array([row.index for _, _, row in sequences]),
        sampled_lens_N=np.array([row.num_trained for _, _, row in sequences]),
        lens_N=tuple(row.num_tokens for _, _, row in sequences),
        is_trained_N=np.ones(len(sequences), np.bool_),
        parent_N=np.array(parents),
        start_N=np.array(starts),
        sample_N=np.array([n for n, _, _ in sequences]) if are_episodes else None,
        version=version,
        nums_images_N=np.array(nums_images) if any(nums_images) else None,
        routed_experts_TLK=ROUTED_EXPERTS if has_experts else None,
        indexer_topk_TLK=INDEXER_TOPK if has_indexer_topk else None,
    )
    return replace(batch, **OF_EPISODES) if are_episodes else batch


def _find_parents(samples: Sequence[StoredSample]) -> tuple[list[int], list[int]]:
    """Return RowFacts.parent and start of each row; responses follow the one before of the prompt.

    Rows of a group are neighbors.
    """
    parents, starts = [], []
    before: tuple[int, int, int] | None = None
    for sample in samples:
        for row in sample.rows:
            parent, start = row.parent, row.start
            prompt_len = len(sample.prompt.token_ids)
            own = (sample.lease.store, sample.lease.group, row.index)
            if not sample.episode_rows and before and before[:2] == own[:2]:
                parent, start = (before[2], prompt_len - 1) if prompt_len >= MIN_SHARED else (-1, 0)
            parents.append(parent)
            starts.append(start)
            before = own
    return parents, starts


def select_stored(batch: StoredBatch, indices: Sequence[int]) -> StoredBatch:
    """Return the sequences at `indices`, in that order."""
    picked = np.array(indices, np.int64)
    arrays = {name: getattr(batch, name) for name in _BY_SEQUENCE}
    return replace(
        batch,
        lens_N=tuple(batch.lens_N[i] for i in indices),
        **{name: value[picked] for name, value in arrays.items() if value is not None},
    )


def without_lost(batch: StoredBatch, lost: SamplesLostError) -> StoredBatch | None:
    """Return the sequences whose stores are there; None if there is none."""
    kept = np.flatnonzero(~np.isin(batch.store_N, list(lost.stores))).tolist()
    return select_stored(batch, kept) if kept else None


def in_parts(batch: StoredBatch, parts: Sequence[Sequence[int]]) -> StoredBatch:
    """Return the sequences of micro-batches, end to end; a micro-batch without any is a filler.

    There is a sequence even if all are fillers, as these are made of it.
    """
    indices = list(chain.from_iterable(parts))
    return replace(select_stored(batch, indices or [0]), parts=tuple(map(len, parts)))


def without_truncated(batch: StoredBatch, samples: Sequence[StoredSample]) -> StoredBatch:
    """Leave cut-off responses and episodes of the batch made of `samples` out of the loss.

    DAPO, arXiv:2503.14476, section 3.4.
    """
    ended = [sample.finish_reason not in CUT_OFF for sample in samples if sample.response_len]
    is_whole_N = by_sequence(batch, np.array(ended, np.bool_))
    return replace(batch, is_trained_N=batch.is_trained_N & is_whole_N)


def with_stored_weights(batch: StoredBatch, aggregation: str, max_response_len: int) -> StoredBatch:
    """Set the batch's loss weights as one optimizer step; see batch.with_loss_weights."""
    trained_N = torch.from_numpy(count_trained_tokens(batch))
    sample_N = None if batch.sample_N is None else torch.from_numpy(batch.sample_N)
    weights_N = sequence_weights(aggregation, trained_N, max_response_len, sample_N)
    return replace(batch, loss_weights_N=weights_N.numpy())


def find_stored_sharing(batch: StoredBatch) -> Sharing:
    """Return what the rows of the batch share, of what is known of them.

    A row whose parent is not in the batch counts as one without.
    """
    if batch.parent_N is None or batch.start_N is None:
        num_rows = len(batch.lens_N)
        return Sharing((-1,) * num_rows, (0,) * num_rows, tuple(range(num_rows)))
    keys = zip(batch.store_N.tolist(), batch.group_N.tolist(), batch.index_N.tolist(), strict=True)
    place = {key: n for n, key in enumerate(keys)}
    parents = [
        place.get((store, group, parent), -1)
        for (store, group, _), parent in zip(place, batch.parent_N.tolist(), strict=True)
    ]
    starts = [
        start if parent >= 0 else 0
        for start, parent in zip(batch.start_N.tolist(), parents, strict=True)
    ]
    return Sharing(tuple(parents), tuple(starts), parents_first(parents))


def count_trained_tokens(batch: StoredBatch) -> Array:
    """Return int64 [N], the trained tokens of each sequence."""
    return batch.sampled_lens_N * batch.is_trained_N


def by_sequence(batch: StoredBatch, values_N: Array) -> Array:
    """Return the value of each sequence's sample; `values_N` has one per sample, in order."""
    return values_N if batch.sample_N is None else values_N[batch.sample_N]


def take_whole(batch: StoredBatch, samples: Sequence[StoredSample]) -> list[StepPart]:
    """Return the whole step as one part."""
    return [StepPart(tuple(range(len(samples))), batch)]


def cut_by_prompts(
    batch: StoredBatch, samples: Sequence[StoredSample], most_tokens: int
) -> list[StepPart]:
    """Return parts that have all samples of their prompts, each sample in one part.

    `batch` was made of `samples`. Prompts without any token are left out.
    """
    with_rows = [place for place, sample in enumerate(samples) if sample.response_len]
    rows_of = dict(zip(with_rows, rows_of_samples(batch), strict=True))
    lens_N = np.array(batch.lens_N)
    prompts: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        prompts.setdefault(sample.prompt.index, []).append(place)
    open_parts: dict[int, list[int]] = {}
    num_tokens: dict[int, int] = {}
    parts: list[list[int]] = []
    for places in prompts.values():
        rows = _rows(rows_of, places)
        if not rows:
            continue
        home = _home(batch.store_N[rows], lens_N[rows])
        own_tokens = int(lens_N[rows].sum())
        if num_tokens.get(home, most_tokens) + own_tokens > most_tokens:
            open_parts[home] = []
            num_tokens[home] = 0
            parts.append(open_parts[home])
        open_parts[home] += places
        num_tokens[home] += own_tokens
    return [_make_part(batch, rows_of, sorted(places)) for places in parts]


def home_of(batch: StoredBatch) -> int:
    """Return the store of most of a batch's tokens."""
    return _home(batch.store_N, np.array(batch.lens_N))


def _home(store_N: np.ndarray, lens_N: np.ndarray) -> int:
    return int(np.bincount(store_N, weights=lens_N).argmax())


def _rows(rows_of: dict[int, list[int]], places: Iterable[int]) -> list[int]:
    return [row for place in places for row in rows_of.get(place, ())]


def _make_part(
    batch: StoredBatch, rows_of: dict[int, list[int]], places: Sequence[int]
) -> StepPart:
    part = select_stored(batch, _rows(rows_of, places))
    if part.sample_N is not None:
        part = replace(part, sample_N=np.unique(part.sample_N, return_inverse=True)[1])
    return StepPart(tuple(places), part)
