"""Makes batches of samples that lie in stores, from what the controller knows of them.

Their arrays are numpy's: such a batch is sent to ranks, and torch pickles small tensors slowly.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from mcore_rl.algo.aggregation import sequence_weights
from mcore_rl.lost_samples import SamplesLost
from mcore_rl.types import Array, StoredBatch, StoredColumn, StoredSample, WeightVersion

ROUTED_EXPERTS = StoredColumn("routed_experts")
_BY_SEQUENCE = (
    "store_N",
    "group_N",
    "index_N",
    "prompt_lens_N",
    "is_trained_N",
    "loss_weights_N",
    "advantages_N",
)


def make_stored_batch(
    samples: Sequence[StoredSample], version: WeightVersion | None = None
) -> StoredBatch:
    """Return the batch of the samples that have a response; see data.batch.make_train_batch."""
    sequences = [sample for sample in samples if sample.response_len]
    if not sequences:
        raise ValueError(f"all {len(samples)} samples are empty: no token to train on")
    prompt_lens = [len(sample.prompt.token_ids) for sample in sequences]
    response_lens = [sample.response_len for sample in sequences]
    has_experts = all(sample.has_experts for sample in sequences)
    return StoredBatch(
        store_N=np.array([sample.lease.store for sample in sequences]),
        group_N=np.array([sample.lease.group for sample in sequences]),
        index_N=np.array([sample.sample_index for sample in sequences]),
        prompt_lens_N=np.array(prompt_lens),
        lens_N=tuple(map(sum, zip(prompt_lens, response_lens, strict=True))),
        is_trained_N=np.ones(len(sequences), np.bool_),
        version=version,
        routed_experts_TLK=ROUTED_EXPERTS if has_experts else None,
    )


def select_stored(batch: StoredBatch, indices: Sequence[int]) -> StoredBatch:
    """Return the sequences at `indices`, in that order."""
    picked = np.array(indices, np.int64)
    arrays = {name: getattr(batch, name) for name in _BY_SEQUENCE}
    return replace(
        batch,
        lens_N=tuple(batch.lens_N[i] for i in indices),
        **{name: value[picked] for name, value in arrays.items() if value is not None},
    )


def without_lost(batch: StoredBatch, lost: SamplesLost) -> StoredBatch | None:
    """Return the sequences whose stores are there; None if there is none."""
    kept = np.flatnonzero(~np.isin(batch.store_N, list(lost.stores))).tolist()
    return select_stored(batch, kept) if kept else None


def in_parts(batch: StoredBatch, parts: Sequence[Sequence[int]]) -> StoredBatch:
    """Return the sequences of micro-batches, end to end; a micro-batch without any is a filler.

    There is a sequence even if all are fillers, as these are made of it.
    """
    indices = list(chain.from_iterable(parts))
    return replace(select_stored(batch, indices or [0]), parts=tuple(map(len, parts)))


def with_stored_weights(batch: StoredBatch, aggregation: str, max_response_len: int) -> StoredBatch:
    """Set the batch's loss weights as one optimizer step; see data.batch.with_loss_weights."""
    trained_N = torch.from_numpy(trained_lens(batch))
    weights_N = sequence_weights(aggregation, trained_N, max_response_len)
    return replace(batch, loss_weights_N=weights_N.numpy())


def trained_lens(batch: StoredBatch) -> Array:
    """Return int64 [N], the trained tokens of each sequence."""
    return (np.array(batch.lens_N) - batch.prompt_lens_N) * batch.is_trained_N
