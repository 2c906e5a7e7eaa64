"""Train batches of samples that this process holds: what reading the stores must give."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from mcore_rl.algo.batch_outcomes import SampleShapes, place_at_tokens
from mcore_rl.algo.estimator import Advantages
from mcore_rl.batches.episodes import columns_of_row
from mcore_rl.types import (
    CUT_OFF,
    GroupLease,
    Row,
    Sample,
    StoredSample,
    TrainBatch,
    VersionSpan,
    WeightVersion,
)
from mcore_rl.types.scores import Scores


def make_train_batch(samples: Sequence[Sample], version: WeightVersion | None = None) -> TrainBatch:
    """Lay prompt and response of each sample end to end, or the rows of each episode."""
    if any(sample.episode is not None for sample in samples):
        return _make_episode_batch(samples, version)
    sequences = [sample for sample in samples if sample.response_ids]
    parts = [part for s in sequences for part in (s.prompt.token_ids, s.response_ids)]
    part_lens = [len(part) for part in parts]
    is_response = torch.tensor([False, True]).repeat(len(sequences))
    mask_T = is_response.repeat_interleave(torch.tensor(part_lens))
    logprobs_T = torch.zeros(len(mask_T))
    logprobs_T[mask_T] = torch.tensor(_flat(s.logprobs for s in sequences))
    starts = [len(sample.prompt.token_ids) for sample in sequences]
    lens_N = tuple(map(sum, zip(part_lens[::2], part_lens[1::2], strict=True)))
    stale = [
        _stale(s.versions, num, start, version)
        for s, num, start in zip(sequences, lens_N, starts, strict=True)
    ]
    return TrainBatch(
        token_ids_T=torch.tensor(_flat(parts)),
        loss_mask_T=mask_T,
        lens_N=lens_N,
        rollout_logprobs_T=logprobs_T,
        stale_T=None if version is None else torch.cat(stale),
        routed_experts_TLK=_routed_experts(sequences),
    )


def _make_episode_batch(samples: Sequence[Sample], version: WeightVersion | None) -> TrainBatch:
    present = [sample.episode for sample in samples if sample.episode and sample.episode.rows]
    rows = [(n, episode, row) for n, episode in enumerate(present) for row in episode.rows]
    columns = [columns_of_row(episode, row) for _, episode, row in rows]

    def join(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([of_row[name] for of_row in columns]))

    stale = [_stale(row.versions, len(row.token_ids), 0, version) for _, _, row in rows]
    return TrainBatch(
        token_ids_T=join("token_ids").long(),
        loss_mask_T=join("loss_mask"),
        lens_N=tuple(len(row.token_ids) for _, _, row in rows),
        rollout_logprobs_T=join("rollout_logprobs"),
        turn_rewards_T=join("turn_rewards"),
        turn_T=join("turn"),
        stale_T=None if version is None else torch.cat(stale),
        routed_experts_TLK=_routed_experts([row for _, _, row in rows]),
        sample_N=tuple(n for n, _, _ in rows),
    )


def _stale(
    spans: Sequence[VersionSpan], num_tokens: int, start: int, version: WeightVersion | None
) -> Tensor:
    stale_T = torch.zeros(num_tokens, dtype=torch.bool)
    for span in spans:
        stale_T[start + span.start : start + span.stop] = span.version != version
    return stale_T


def _routed_experts(sequences: Sequence[Sample] | Sequence[Row]) -> Tensor | None:
    """Return the experts of all tokens, -1 for the last of each sequence, or None."""
    kept = [s.routed_experts for s in sequences if s.routed_experts is not None]
    if len(kept) != len(sequences):
        return None
    unknown = torch.full((1, *kept[0].shape[1:]), -1, dtype=kept[0].dtype)
    return torch.cat([part for experts in kept for part in (experts, unknown)])


def _flat(rows: Iterable[Sequence[float]]) -> list[float]:
    return list(chain.from_iterable(rows))


def mask_truncated(batch: TrainBatch, samples: Sequence[Sample]) -> TrainBatch:
    """Remove cut-off responses and episodes from the loss mask of the batch made of `samples`."""
    ended = [sample.finish_reason not in CUT_OFF for sample in samples if sample.response_len]
    whole_N = torch.tensor(ended)
    if batch.sample_N is not None:
        whole_N = whole_N[torch.tensor(batch.sample_N)]
    whole_T = whole_N.repeat_interleave(torch.tensor(batch.lens_N))
    return replace(batch, loss_mask_T=batch.loss_mask_T & whole_T)


def refer_to(samples: Sequence[Sample | StoredSample]) -> list[StoredSample]:
    """Return samples as the controller knows them, though no store has them."""
    return [
        StoredSample(
            sample.prompt,
            sample.sample_index,
            sample.response_len,
            sample.finish_reason,
            sample.versions,
            False,
            GroupLease(0, 0),
        )
        for sample in samples
    ]


def estimate(
    advantages: Advantages,
    scores: Scores,
    samples: Sequence[Sample] | Sequence[StoredSample],
    batch: TrainBatch,
) -> tuple[TrainBatch, dict[str, float]]:
    """Return (the batch with advantages and returns of the step as one part, metrics)."""
    rows = refer_to(samples)
    shapes = SampleShapes.from_samples(rows)
    batch, sums = advantages.compute_from_tokens(batch, shapes, scores)
    metrics = advantages.summarize(scores, rows, sums)
    if advantages.sees == "samples":
        advantages_N = advantages.compute_from_samples(scores, rows, sums)
        advantages_R = advantages_N.repeat_interleave(shapes.lens_N)
        batch = replace(
            batch, advantages_T=place_at_tokens(batch, advantages_R, advantages._config)
        )
    elif advantages.are_normalized:
        batch, _ = advantages.normalize(batch, sums)
    advantages.steer(metrics, len(samples))
    return batch, metrics
