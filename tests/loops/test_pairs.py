"""Preference data of a policy's own responses."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from mcore_rl.algo.policy_loss import sft_loss
from mcore_rl.config import RewardConfig
from mcore_rl.loops.outcomes import RewardFailureError
from mcore_rl.loops.pairs import sample_pairs, write_pairs
from mcore_rl.types import Prompt, Sample
from mcore_rl.types.scores import Scores
from tests.support.table_policy import TablePolicy, make_prompts, repeats_the_prompt


class Cut(TablePolicy):
    """Every response whose first token is 0 is cut off."""

    def _sample(
        self, prompt: Prompt, index: int, greedy: bool, generator: torch.Generator
    ) -> Sample:
        sample = super()._sample(prompt, index, greedy, generator)
        is_cut_off = sample.response_ids[0] == 0
        return replace(sample, finish_reason="length" if is_cut_off else "stop")


def pairs_by(
    policy: TablePolicy,
    function: Callable[[Sequence[Sample]], Scores],
    prompts: Sequence[Prompt],
    num_samples: int,
    num_pairs: int,
    rewards: RewardConfig | None = None,
) -> list[dict[str, Any]]:
    reward, read = policy.reward_by(function), policy.stores.samples
    rewards = rewards or RewardConfig()
    return sample_pairs(policy, reward, prompts, num_samples, num_pairs, 0, rewards, read)


def reward_of(text: str, target: int) -> float:
    return text.split().count(str(target)) / 3


def test_a_better_response_is_chosen_over_a_worse_one() -> None:
    prompts = make_prompts(6)
    rows = pairs_by(Cut(sft_loss), repeats_the_prompt, prompts, 8, 2)
    assert rows
    for row in rows:
        target = int(row["prompt"][0]["content"]) % 5
        chosen, rejected = row["chosen"][0]["content"], row["rejected"][0]["content"]
        assert reward_of(chosen, target) > reward_of(rejected, target)
        assert not chosen.startswith("0") and not rejected.startswith("0")
    by_prompt = [row["prompt"][0]["content"] for row in rows]
    assert by_prompt == sorted(by_prompt) and max(map(by_prompt.count, by_prompt)) == 2


def test_failed_and_equal_rewards_make_no_pair() -> None:
    def failing(samples: Sequence[Sample]) -> Scores:
        scores = repeats_the_prompt(samples)
        return replace(scores, errors=["failed"] * len(samples))

    def equal(samples: Sequence[Sample]) -> Scores:
        return Scores([1.0] * len(samples))

    def pairs_of(
        function: Callable[[Sequence[Sample]], Scores], rewards: RewardConfig
    ) -> list[dict[str, Any]]:
        return pairs_by(TablePolicy(sft_loss), function, make_prompts(2), 4, 1, rewards)

    for reward in (failing, equal):
        assert pairs_of(reward, RewardConfig(max_failed_share=1)) == []
    with pytest.raises(RewardFailureError, match=r"^pairs: 8 of 8 rewards failed, .*: 'failed'"):
        pairs_of(failing, RewardConfig())


def test_rows_are_written_and_none_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = make_prompts(3)
    rows = pairs_by(TablePolicy(sft_loss), repeats_the_prompt, prompts, 6, 1)
    path = tmp_path / "pairs" / "train.parquet"
    write_pairs(rows, path, 3)
    assert pq.read_table(path).to_pylist() == rows
    assert f"{len(rows)} pairs from 3 prompts in {path}" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"none of 3 prompts has two responses that differ in rew"):
        write_pairs([], path, 3)
