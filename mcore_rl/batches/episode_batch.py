"""Makes train batches of episodes that this process holds; others: batches/stored_batch.py."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mcore_rl.batches.episodes import (
    LOSS_MASK,
    ROLLOUT_LOGPROBS,
    TOKEN_IDS,
    TURN,
    TURN_REWARDS,
    columns_of_row,
)
from mcore_rl.types import Array, Row, Sample, TrainBatch, WeightVersion


def make_episode_batch(
    samples: Sequence[Sample], version: WeightVersion | None = None
) -> TrainBatch:
    """Lay the rows of all episodes end to end, in the order of `samples`.

    Episodes without a row are left out. `version` as in data.batch.make_train_batch.
    """
    present = [sample.episode for sample in samples if sample.episode and sample.episode.rows]
    if not present:
        raise ValueError(f"all {len(samples)} episodes are empty: no token to train on")
    rows = [(n, episode, row) for n, episode in enumerate(present) for row in episode.rows]
    columns = [columns_of_row(episode, row) for _, episode, row in rows]

    def joined(name: str) -> Array:
        return np.concatenate([of_row[name] for of_row in columns])

    return TrainBatch(
        token_ids_T=torch.from_numpy(joined(TOKEN_IDS).astype(np.int64)),
        loss_mask_T=torch.from_numpy(joined(LOSS_MASK)),
        lens_N=tuple(len(row.token_ids) for _, _, row in rows),
        rollout_logprobs_T=torch.from_numpy(joined(ROLLOUT_LOGPROBS)),
        turn_rewards_T=torch.from_numpy(joined(TURN_REWARDS)),
        turn_T=torch.from_numpy(joined(TURN)),
        stale_T=None
        if version is None
        else torch.cat([_stale(row, version) for _, _, row in rows]),
        routed_experts_TLK=_routed_experts([row for _, _, row in rows]),
        sample_N=tuple(n for n, _, _ in rows),
    )


def _stale(row: Row, version: WeightVersion) -> Tensor:
    stale_T = torch.zeros(len(row.token_ids), dtype=torch.bool)
    for span in row.versions:
        stale_T[span.start : span.stop] = span.version != version
    return stale_T


def _routed_experts(rows: Sequence[Row]) -> Tensor | None:
    """Return the experts of all tokens, -1 for the last of each row, which no engine has run."""
    kept = [row.routed_experts for row in rows if row.routed_experts is not None]
    if len(kept) != len(rows):
        return None
    unknown = torch.full((1, *kept[0].shape[1:]), -1, dtype=kept[0].dtype)
    return torch.cat([part for experts in kept for part in (experts, unknown)])
