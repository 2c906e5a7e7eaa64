"""Turns samples into train batches, and cuts batches into smaller ones by sequence index."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from mcore_rl.algo.aggregation import loss_weights
from mcore_rl.batches.episode_batch import make_episode_batch
from mcore_rl.batches.stored_batch import make_stored_batch, select_stored, with_stored_weights
from mcore_rl.data.images.batch import select_images
from mcore_rl.types import (
    CUT_OFF,
    AnyBatch,
    AnySample,
    Sample,
    StoredBatch,
    StoredSample,
    TrainBatch,
    WeightVersion,
)

B = TypeVar("B", bound=AnyBatch)
NUMPY_DTYPES = {torch.int64: np.int64, torch.float32: np.float32}


def make_batch(samples: Sequence[AnySample], version: WeightVersion | None = None) -> AnyBatch:
    """Return the batch of samples that all lie in stores or are all here; see make_train_batch."""
    here = [sample for sample in samples if isinstance(sample, Sample)]
    if here:
        assert len(here) == len(samples), "some samples are here, others in stores"
        return make_train_batch(here, version)
    return make_stored_batch([s for s in samples if isinstance(s, StoredSample)], version)


def make_train_batch(samples: Sequence[Sample], version: WeightVersion | None = None) -> TrainBatch:
    """Lay prompt and response of each sample end to end, in the order of `samples`; train on
    responses.

    Samples without a response token are left out. Raises ValueError if no sample has one.

    version   weights that are trained; tokens sampled from other weights are marked stale. None: no
              marks.
    """
    assert not any(sample.prompt.images for sample in samples), "their patches lie in stores"
    if any(sample.episode is not None for sample in samples):
        return make_episode_batch(samples, version)
    sequences = [sample for sample in samples if sample.response_ids]
    if not sequences:
        raise ValueError(f"all {len(samples)} samples are empty: no token to train on")
    parts = [part for s in sequences for part in (s.prompt.token_ids, s.response_ids)]
    part_lens = [len(part) for part in parts]
    is_response = torch.tensor([False, True]).repeat(len(sequences))
    mask_T = is_response.repeat_interleave(torch.tensor(part_lens))
    logprobs_T = torch.zeros(len(mask_T))
    logprobs_T[mask_T] = _flat((s.logprobs for s in sequences), torch.float32)
    return TrainBatch(
        token_ids_T=_flat(parts, torch.int64),
        loss_mask_T=mask_T,
        lens_N=tuple(map(sum, zip(part_lens[::2], part_lens[1::2], strict=True))),
        rollout_logprobs_T=logprobs_T,
        stale_T=None if version is None else _stale(sequences, version),
        routed_experts_TLK=_routed_experts(sequences),
    )


def _stale(samples: Sequence[Sample], version: WeightVersion) -> Tensor:
    """Return bool [T], True on tokens that were sampled from other weights than `version`."""
    lens: list[int] = []
    is_stale: list[bool] = []
    for sample in samples:
        lens.append(len(sample.prompt.token_ids))
        is_stale.append(False)
        for span in sample.versions:
            lens.append(span.stop - span.start)
            is_stale.append(span.version != version)
    return torch.tensor(is_stale).repeat_interleave(torch.tensor(lens))


def _routed_experts(samples: Sequence[Sample]) -> Tensor | None:
    """Lay the rows of all samples end to end; None unless all have them.

    The last token of each sample gets -1: no engine has run it.
    """
    rows = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
    if len(rows) != len(samples):
        return None
    unknown = torch.full((1, *rows[0].shape[1:]), -1, dtype=rows[0].dtype)
    return torch.cat([part for row in rows for part in (row, unknown)])


def without_truncated(batch: B, samples: Sequence[AnySample]) -> B:
    """Remove cut-off responses and episodes from the loss mask of the batch made of `samples`.

    DAPO, arXiv:2503.14476, section 3.4.
    """
    whole_N = torch.tensor(
        [sample.finish_reason not in CUT_OFF for sample in samples if sample.response_len]
    )
    if batch.sample_N is not None:
        whole_N = whole_N[torch.tensor(batch.sample_N)]
    if isinstance(batch, StoredBatch):
        return replace(batch, is_trained_N=batch.is_trained_N & whole_N.numpy())
    whole_T = whole_N.repeat_interleave(torch.tensor(batch.lens_N))
    return replace(batch, loss_mask_T=batch.loss_mask_T & whole_T)


def select(batch: B, indices: Sequence[int]) -> B:
    """Return the sequences at `indices`, in that order."""
    return select_each(batch, [indices])[0]


def select_each(batch: B, groups: Sequence[Sequence[int]]) -> list[B]:
    """Return a batch of the sequences at each group's indices, in that order."""
    if isinstance(batch, StoredBatch):
        return [select_stored(batch, indices) for indices in groups]
    lens = [tuple(batch.lens_N[i] for i in indices) for indices in groups]
    sample_N = batch.sample_N
    rows_S = tokens_of(batch.lens_N, [i for indices in groups for i in indices])
    rows_by_group = rows_S.split([sum(of_group) for of_group in lens])
    fields = batch.token_fields()
    return [
        replace(
            batch,
            lens_N=of_group,
            sample_N=sample_N and tuple(sample_N[i] for i in indices),
            images=own_images,
            **{name: value[rows] for name, value in fields.items()},
        )
        for of_group, rows, indices, own_images in zip(
            lens, rows_by_group, groups, select_images(batch.images, groups), strict=True
        )
    ]


def tokens_of(lens_N: Sequence[int], indices: Sequence[int]) -> Tensor:
    """Return where the tokens of the sequences at `indices` lie among those of all, int64 [S]."""
    all_lens_N = torch.tensor(lens_N, dtype=torch.int64)
    starts_N = all_lens_N.cumsum(0) - all_lens_N
    picked = torch.tensor(indices, dtype=torch.int64)
    lens = all_lens_N[picked]
    shift = starts_N[picked] - (lens.cumsum(0) - lens)
    return torch.arange(int(lens.sum())) + shift.repeat_interleave(lens)


def split_by_lens(values_T: Tensor, lens_N: Sequence[int]) -> tuple[Tensor, ...]:
    """Return one view of `values_T` per sequence."""
    return values_T.split(list(lens_N))


def rows_of_samples(batch: AnyBatch) -> list[list[int]]:
    """Return the indices of the sequences that belong to each sample."""
    if batch.sample_N is None:
        return [[i] for i in range(len(batch.lens_N))]
    rows: dict[int, list[int]] = {}
    for i, sample in enumerate(batch.sample_N):
        rows.setdefault(int(sample), []).append(i)
    return list(rows.values())


def plan_mini_batches(
    num_samples: int, mini_batches: int, epochs: int, seed: int
) -> list[list[int]]:
    """Return the indices of the samples of each optimizer step.

    Every epoch has every sample once, in a new random assignment to mini-batches whose sizes
    differ by at most one. With one mini-batch the order is kept.
    """
    steps = []
    for epoch in range(epochs):
        if mini_batches == 1:
            order = list(range(num_samples))
        else:
            generator = torch.Generator().manual_seed(seed * 1009 + epoch)
            order = torch.randperm(num_samples, generator=generator).tolist()
        steps += [sorted(order[i::mini_batches]) for i in range(mini_batches)]
    return [step for step in steps if step]


def with_loss_weights(batch: B, aggregation: str, max_response_len: int) -> B:
    """Set the batch's loss weights as one optimizer step; max_response_len in tokens."""
    if isinstance(batch, StoredBatch):
        return with_stored_weights(batch, aggregation, max_response_len)
    weights_T = loss_weights(
        aggregation, batch.loss_mask_T, batch.lens_N, max_response_len, batch.sample_N
    )
    return replace(batch, loss_weights_T=weights_T)


def make_filler(batch: TrainBatch) -> TrainBatch:
    """Return a micro-batch of the batch's first two tokens without weight.

    A rank with fewer micro-batches than the others runs it to take part in collectives.
    """
    values = {name: value[:2] for name, value in batch.token_fields().items()}
    values["loss_mask_T"] = torch.zeros(2, dtype=torch.bool)
    if batch.loss_weights_T is not None:
        values["loss_weights_T"] = torch.zeros(2)
    sample_N = None if batch.sample_N is None else (0,)
    return replace(batch, lens_N=(2,), sample_N=sample_N, is_filler=True, images=None, **values)


def _flat(rows: Iterable[Sequence], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), NUMPY_DTYPES[dtype]))
