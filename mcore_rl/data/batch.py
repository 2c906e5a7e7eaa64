"""Samples in, train batches out; batches cut into smaller ones by sequence index."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from mcore_rl.algo.aggregation import loss_weights
from mcore_rl.types import Sample, TrainBatch, WeightVersion


def make_train_batch(samples: Sequence[Sample], version: WeightVersion | None = None) -> TrainBatch:
    """Prompt and response of each sample laid end to end, trained on the response, in the order of `samples`.

    Samples without a response token are left out: there is nothing to train on. ValueError if none has any.
    `version`: of the weights that train; tokens sampled from another one are stale.
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
    of_response = [
        span.version != version for span in sample.versions for _ in range(span.start, span.stop)
    ]
    return [False] * len(sample.prompt.token_ids) + of_response


def _routed_experts(samples: Sequence[Sample]) -> Tensor | None:
    """Rows of all samples end to end, -1 for the last token of each, which no engine has run."""
    rows = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
    if len(rows) != len(samples):
        return None
    unknown = torch.full((1, *rows[0].shape[1:]), -1, dtype=rows[0].dtype)
    return torch.cat([part for row in rows for part in (row, unknown)])


def without_truncated(batch: TrainBatch, samples: Sequence[Sample]) -> TrainBatch:
    """The batch made of `samples` with no loss on responses that were cut off; DAPO, arXiv:2503.14476,
    section 3.4.
    """
    whole_N = torch.tensor(
        [sample.finish_reason != "length" for sample in samples if sample.response_ids]
    )
    whole_T = whole_N.repeat_interleave(torch.tensor(batch.lens_N))
    return replace(batch, loss_mask_T=batch.loss_mask_T & whole_T)


def select(batch: TrainBatch, indices: Sequence[int]) -> TrainBatch:
    """The sequences at `indices`, in that order."""
    stops = list(accumulate(batch.lens_N))
    rows = [slice(stops[i] - batch.lens_N[i], stops[i]) for i in indices]
    picked = {
        name: torch.cat([value[r] for r in rows]) for name, value in batch.token_fields().items()
    }
    return replace(batch, lens_N=tuple(batch.lens_N[i] for i in indices), **picked)


def split_by_lens(values_T: Tensor, lens_N: Sequence[int]) -> tuple[Tensor, ...]:
    """One view of `values_T` per sequence."""
    return values_T.split(list(lens_N))


def plan_mini_batches(
    num_sequences: int, mini_batches: int, epochs: int, seed: int
) -> list[list[int]]:
    """Sequence indices of each optimizer step: every sequence once per epoch, shuffled anew in each.

    Sizes differ by at most one; with one mini-batch the order is kept.
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
    """The batch as one optimizer step: loss weights over all of its sequences."""
    weights_T = loss_weights(aggregation, batch.loss_mask_T, batch.lens_N, max_response_len)
    return replace(batch, loss_weights_T=weights_T)


def make_filler(batch: TrainBatch) -> TrainBatch:
    """A micro-batch without weight, for a rank that has fewer than the others: the batch's first two
    tokens.
    """
    values = {name: value[:2] for name, value in batch.token_fields().items()}
    values["loss_mask_T"] = torch.zeros(2, dtype=torch.bool)
    if batch.loss_weights_T is not None:
        values["loss_weights_T"] = torch.zeros(2)
    return replace(batch, lens_N=(2,), is_filler=True, **values)


def _flat(rows: Iterable[Sequence], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype)
