"""Cuts train batches into smaller ones by sequence index, and sets their loss weights."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mcore_rl.algo.aggregation import loss_weights
from mcore_rl.data.images.batch import select_images
from mcore_rl.types import StoredBatch, TrainBatch


def select(batch: TrainBatch, indices: Sequence[int]) -> TrainBatch:
    """Return the sequences at `indices`, in that order."""
    return select_each(batch, [indices])[0]


def select_each(batch: TrainBatch, groups: Sequence[Sequence[int]]) -> list[TrainBatch]:
    """Return a batch of the sequences at each group's indices, in that order."""
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


def rows_of_samples(batch: TrainBatch | StoredBatch) -> list[list[int]]:
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


def with_loss_weights(batch: TrainBatch, aggregation: str, max_response_len: int) -> TrainBatch:
    """Set the batch's loss weights as one optimizer step; max_response_len in tokens."""
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
