"""Makes preference pairs of a model's own responses: a better and a worse one by the reward."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from mcore_rl.algo.preferences import best_and_worst
from mcore_rl.config import RewardConfig
from mcore_rl.data.preferences import preference_row
from mcore_rl.data.rows import write_parquet
from mcore_rl.loops.outcomes import RewardFailures
from mcore_rl.loops.resampling import sample_and_score
from mcore_rl.loops.roles import Generator, ReadSamples, Reward
from mcore_rl.types import Prompt, Sample

Scored = tuple[Sample, float]
"""A sample and its reward."""


def sample_pairs(
    generator: Generator,
    reward: Reward,
    prompts: Sequence[Prompt],
    num_samples: int,
    pairs_per_prompt: int,
    seed: int,
    rewards: RewardConfig,
    read: ReadSamples,
) -> list[dict[str, Any]]:
    """Return rows of a preference file, from `num_samples` samples of each prompt.

    rewards   how many of them may fail
    read      brings the samples here from their stores

    Responses that were cut off or whose reward failed are left out, as are prompts whose responses
    all have the same reward.

    Raises RewardFailureError if more rewards failed than the recipe bears.
    """
    drawn = sample_and_score(generator, reward, prompts, num_samples, greedy=False, seed=seed)
    scores = drawn.scores
    failures = RewardFailures()
    failures.note(scores)
    failures.check(rewards, "pairs")
    errors = scores.errors or [""] * len(drawn.samples)
    scored = [
        (sample, value)
        for sample, value, error in zip(read(drawn.samples), scores.rewards_N, errors, strict=True)
        if sample.finish_reason == "stop" and not error
    ]
    rows = []
    for _, group in groupby(scored, key=lambda pair: pair[0].prompt.index):
        rows += _rows_of_prompt(list(group), pairs_per_prompt)
    return rows


def write_pairs(rows: Sequence[dict[str, Any]], path: Path, num_prompts: int) -> None:
    """Write the rows to a parquet file. Raises ValueError if there are none."""
    if not rows:
        raise ValueError(
            f"none of {num_prompts} prompts has two responses that differ in reward: nothing for"
            f" {path}; raise rollout.samples_per_prompt or rollout.temperature, or give other"
            " prompts"
        )
    write_parquet(rows, path)
    print(f"{len(rows)} pairs from {num_prompts} prompts in {path}")


def _rows_of_prompt(group: Sequence[Scored], num_pairs: int) -> list[dict[str, Any]]:
    messages = group[0][0].prompt.messages
    texts = [sample.text for sample, _ in group]
    rewards = [value for _, value in group]
    return [
        preference_row(messages, texts[chosen], texts[rejected])
        for chosen, rejected in best_and_worst(rewards, texts, num_pairs)
    ]
