"""Episodes as samples, and their rows as the columns that a sample store keeps."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from mcore_rl.types import Array, EpisodeRecord, Prompt, Row, Sample, VersionSpan, WeightVersion

TOKEN_IDS = "token_ids"
ROLLOUT_LOGPROBS = "rollout_logprobs"
LOSS_MASK = "loss_mask"
TURN_REWARDS = "turn_rewards"
TURN = "turn"


def columns_of_row(episode: EpisodeRecord, row: Row) -> dict[str, Array]:
    """Return the token-aligned columns of one of an episode's rows, but for its routed experts."""
    rewards = _turn_rewards(episode, row)
    return {**_make_sampled_columns(row), TURN_REWARDS: rewards, TURN: row.turn_T}


def _make_sampled_columns(row: Row) -> dict[str, Array]:
    return {
        TOKEN_IDS: row.token_ids,
        ROLLOUT_LOGPROBS: row.logprobs,
        LOSS_MASK: row.is_trained,
    }


def _turn_rewards(episode: EpisodeRecord, row: Row) -> Array:
    """Return float32 [T], the reward of each turn at the last token that the row trains of it."""
    rewards = np.zeros(len(row.token_ids), np.float32)
    for turn in np.unique(row.turn_T[row.is_trained]):
        last = np.flatnonzero(row.turn_T == turn)[-1]
        rewards[last] = episode.turns[turn].reward
    return rewards


def sample_of_episode(prompt: Prompt, index: int, episode: EpisodeRecord, text: str) -> Sample:
    """Return an episode as sample number `index` of its prompt; `text` is the conversation."""
    parts = [(row.versions, _make_sampled_columns(row)) for row in episode.rows]
    return Sample(
        prompt=prompt,
        sample_index=index,
        finish_reason=episode.end,
        text=text,
        episode=episode,
        engines=episode.engines,
        **flat_response(parts),
    )


def flat_response(
    rows: Iterable[tuple[tuple[VersionSpan, ...], Mapping[str, Array]]],
) -> dict[str, Any]:
    """Return response_ids, logprobs and versions of a Sample: what rows train, row after row.

    `rows` are (versions in positions of the row, columns).
    """
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for spans, columns in rows:
        is_trained = columns[LOSS_MASK]
        ids += columns[TOKEN_IDS][is_trained].tolist()
        logprobs += columns[ROLLOUT_LOGPROBS][is_trained].tolist()
        version_T = np.full(len(is_trained), -1)
        for span in spans:
            version_T[span.start : span.stop] = span.version
        versions += version_T[is_trained].tolist()
    return {
        "response_ids": tuple(ids),
        "logprobs": tuple(logprobs),
        "versions": spans_of(versions),
    }


def spans_of(versions: list[int]) -> tuple[VersionSpan, ...]:
    """Return the spans of equal neighbors."""
    starts = [i for i, v in enumerate(versions) if i == 0 or v != versions[i - 1]]
    return tuple(
        VersionSpan(start, stop, WeightVersion(versions[start]))
        for start, stop in pairwise([*starts, len(versions)])
    )


def metrics_of(episode: EpisodeRecord) -> dict[str, float]:
    """Return the numbers of an episode, by name; those of its environment are among them."""
    forks = [turn for turn in episode.turns if turn.fork]
    return {
        "turns": float(len(episode.turns)),
        "rows": float(len(episode.rows)),
        "row_tokens": float(sum(len(row.token_ids) for row in episode.rows)),
        "forks": float(len(forks)),
        **episode.metrics,
    }
