"""Turns samples into train batches, and cuts batches into smaller ones by sequence index."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from mcore_rl.algo.aggregation import loss_weights
from mcore_rl.types import Sample, TrainBatch, WeightVersion


def make_train_batch(samples: Sequence[Sample], version: WeightVersion | None = None) -> TrainBatch:
    """Lay prompt and response of each sample end to end, in the order of `samples`; train on
    responses.

    Samples without a response token are left out. Raises ValueError if no sample has one.

    version   weights that are trained; tokens sampled from other weights are marked stale. None: no
              marks.
    """
    kept = [i for i, sample in enumerate(samples) if sample.response_ids]
    if not kept:
        raise ValueError(f"all {len(samples)} samples are empty: no token to train on")
    sequences = [samples[i] for i in kept]
    prompt_lens = [len(sample.prompt.token_ids) for sample in sequences]
    lens_N = tuple(n + len(s.response_ids) for n, s in zip(prompt_lens, sequences, strict=True))
    return TrainBatch(
        token_ids_T=_flat((s.prompt.token_ids + s.response_ids for s in sequences), torch.int64),
        loss_mask_T=_flat(
            (
                [False] * n + [True] * len(s.response_ids)
                for n, s in zip(prompt_lens, sequences, strict=True)
            ),
            torch.bool,
        ),
        lens_N=lens_N,
        rollout_logprobs_T=_flat(
            ([0.0] * n + list(s.logprobs) for n, s in zip(prompt_lens, sequences, strict=True)),
            torch.float32,
        ),
        stale_T=None
        if version is None
        else _flat((_stale(s, version) for s in sequences), torch.bool),
        routed_experts_TLK=_routed_experts(sequences),
    )


def _stale(sample: Sample, version: WeightVersion) -> list[bool]:
    """Return, for each token of the sample, whether it was sampled from other weights than
    `version`.
    """
    stale = [False] * len(sample.prompt.token_ids)
    for span in sample.versions:
        stale += [span.version != version] * (span.stop - span.start)
    return stale


def _routed_experts(samples: Sequence[Sample]) -> Tensor | None:
    """Lay the rows of all samples end to end; None unless all have them.

    The last token of each sample gets -1: no engine has run it.
    """
    rows = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
    if len(rows) != len(samples):
        return None
    unknown = torch.full((1, *rows[0].shape[1:]), -1, dtype=rows[0].dtype)
    return torch.cat([part for row in rows for part in (row, unknown)])


def without_truncated(batch: TrainBatch, samples: Sequence[Sample]) -> TrainBatch:
    """Remove cut-off responses from the loss mask of the batch that was made of `samples`.

    DAPO, arXiv:2503.14476, section 3.4.
    """
    whole_N = torch.tensor(
        [sample.finish_reason != "length" for sample in samples if sample.response_ids]
    )
    whole_T = whole_N.repeat_interleave(torch.tensor(batch.lens_N))
    return replace(batch, loss_mask_T=batch.loss_mask_T & whole_T)


def select(batch: TrainBatch, indices: Sequence[int]) -> TrainBatch:
    """Return the sequences at `indices`, in that order."""
    stops = list(accumulate(batch.lens_N))
    rows = [slice(stops[i] - batch.lens_N[i], stops[i]) for i in indices]
    picked = {
        name: torch.cat([value[r] for r in rows]) for name, value in batch.token_fields().items()
    }
    return replace(batch, lens_N=tuple(batch.lens_N[i] for i in indices), **picked)


def split_by_lens(values_T: Tensor, lens_N: Sequence[int]) -> tuple[Tensor, ...]:
    """Return one view of `values_T` per sequence."""
    return values_T.split(list(lens_N))


def plan_mini_batches(
    num_sequences: int, mini_batches: int, epochs: int, seed: int
) -> list[list[int]]:
    """Return the sequence indices of each optimizer step.

    Every epoch has every sequence once, in a new random assignment to mini-batches whose sizes
    differ by at most one. With one mini-batch the order is kept.
    """
    steps = []
    for epoch in range(epochs):
        if mini_batches == 1:
            order = list(range(num_sequences))
        else:
            generator = torch.Generator().manual_seed(seed * 1009 + epoch)
            order = torch.randperm(num_sequences, generator=generator).tolist()
        steps += [sorted(order[i::mini_batches]) for i in range(mini_batches)]
    return [step for step in steps if step]


def with_loss_weights(batch: TrainBatch, aggregation: str, max_response_len: int) -> TrainBatch:
    """Set the batch's loss weights as one optimizer step; max_response_len in tokens."""
    weights_T = loss_weights(aggregation, batch.loss_mask_T, batch.lens_N, max_response_len)
    return replace(batch, loss_weights_T=weights_T)


def make_filler(batch: TrainBatch) -> TrainBatch:
    """Return a micro-batch of the batch's first two tokens without weight.

    A rank with fewer micro-batches than the others runs it to take part in collectives.
    """
    values = {name: value[:2] for name, value in batch.token_fields().items()}
    values["loss_mask_T"] = torch.zeros(2, dtype=torch.bool)
    if batch.loss_weights_T is not None:
        values["loss_weights_T"] = torch.zeros(2)
    return replace(batch, lens_N=(2,), is_filler=True, **values)


def _flat(rows: Iterable[Sequence], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype)
