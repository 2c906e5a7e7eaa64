"""Dynamic sampling: groups that differ are kept, others sampled in their place, until enough or the
end.
"""

from collections.abc import Callable, Sequence
from math import isnan
from pathlib import Path
from typing import Any, cast

import pytest

from mcore_rl.config import RewardConfig, RolloutConfig
from mcore_rl.logs.ledger.file import read_records
from mcore_rl.logs.ledger.ledger import LaunchEntry, RunLedger
from mcore_rl.logs.logger import PhaseTimer
from mcore_rl.loops.outcomes import RewardFailureError
from mcore_rl.loops.roles import NO_RECOVERY, Roles
from mcore_rl.loops.sampling import SamplingOptions, draw_rollout
from mcore_rl.types import GroupLease, Prompt, StoredSample, VersionSpan, WeightVersion
from mcore_rl.types.scores import Scores

GROUP = 3
ALWAYS = {
    "reward/errors": 0.0,
    "reward/failed_share": 0.0,
    "rollout/lost": 0.0,
    "staleness/mean": 0.0,
    "staleness/max": 0.0,
    "staleness/partial": 0.0,
    "idle/engines": 0.25,
}


class Numbered:
    """Prompts 0, 1, 2, ... and samples of them, empty ones of the first `num_empty`."""

    def __init__(self, num_empty: int = 0) -> None:
        self.num_taken, self.seeds = 0, []
        self.num_empty = num_empty
        self.rewards_of: dict[int, list[float]] = {}

    def take(self, num_items: int) -> list[Prompt]:
        first, self.num_taken = self.num_taken, self.num_taken + num_items
        return [Prompt(i, (1,), (), "unit", "", position=i) for i in range(first, self.num_taken)]

    def note_scores(self, prompts: Sequence[Prompt], scores: Scores) -> None:
        for i, prompt in enumerate(prompts):
            self.rewards_of[prompt.index] = scores.rewards_N[i * GROUP : (i + 1) * GROUP]

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        *,
        greedy: bool,
        seed: int,
        for_eval: bool = False,
    ) -> list[StoredSample]:
        self.seeds.append(seed)
        return [
            StoredSample(
                prompt,
                i,
                int(prompt.index >= self.num_empty),
                "stop" if prompt.index >= self.num_empty else "deadline",
                (VersionSpan(0, 1, WeightVersion(0)),),
                False,
                GroupLease(0, prompt.index),
            )
            for prompt in prompts
            for i in range(num_samples)
        ]

    def measure_engines(self) -> dict[str, float]:
        return {"idle/engines": 0.25}

    def take_num_lost(self) -> int:
        return 0


def run(
    differing: set[int], with_greedy: bool = False, **options: object
) -> tuple[list[str], Scores, dict[str, float], Numbered]:
    """Samples of prompts in `differing` have unlike rewards."""

    def reward(samples: Sequence[StoredSample]) -> Scores:
        rewards = [float(s.prompt.index in differing and s.sample_index == 0) for s in samples]
        return Scores(
            rewards, {"index": [float(s.prompt.index) for s in samples]}, [""] * len(samples)
        )

    parts = Numbered()
    fields: dict[str, Any] = dict.fromkeys(Roles.__dataclass_fields__) | {"recovery": NO_RECOVERY}
    given = {"prompts": parts, "generator": parts, "reward": reward}
    roles = Roles(**fields | given)
    rollout = RolloutConfig(prompts_per_step=2, samples_per_prompt=GROUP, **cast(Any, options))
    sampling = SamplingOptions(rollout, with_greedy=with_greedy)
    drawn = draw_rollout(sampling, roles, PhaseTimer(1), 7)
    metrics = dict(drawn.metrics)
    assert {name: metrics.pop(name) for name in ALWAYS} == ALWAYS
    names = [f"{sample.prompt.index} {sample.sample_index}" for sample in drawn.samples]
    return names, drawn.scores, metrics, parts


def test_the_stream_of_prompts_learns_of_all_samples_also_of_groups_that_are_replaced() -> None:
    """A curriculum by pass rate depends on it."""
    parts = run({1, 4}, dynamic_sampling=True)[-1]
    unlike = [1.0, *[0.0] * (GROUP - 1)]
    rewards_of = {i: unlike if i in {1, 4} else [0.0] * GROUP for i in range(parts.num_taken)}
    assert parts.rewards_of == rewards_of


@pytest.mark.parametrize(("num_empty", "expected"), [(1, 0), (2, 2), (4, 4), (100, 4)])
def test_a_step_without_a_token_is_drawn_from_the_next_prompts(
    num_empty: int, expected: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = Numbered(num_empty)
    fields: dict[str, Any] = dict.fromkeys(Roles.__dataclass_fields__) | {"recovery": NO_RECOVERY}
    given: dict[str, Any] = {"reward": lambda samples: Scores([0.0] * len(samples))}
    with RunLedger(tmp_path / "ledger.jsonl") as ledger:
        ledger.begin(LaunchEntry(0, 0, (), (9,), 0, "sync", 0, GROUP))
        given |= {"prompts": parts, "generator": parts, "ledger": ledger}
        roles = Roles(**fields | given)
        rollout = RolloutConfig(prompts_per_step=2, samples_per_prompt=GROUP)
        drawn = draw_rollout(SamplingOptions(rollout), roles, PhaseTimer(1), 7)
    assert drawn.samples[0].prompt.index == expected
    assert len(set(parts.seeds)) == len(parts.seeds) == expected // 2 + 1
    told = "none of 6 samples has a token to train on (deadline 6); drawing from the next prompts"
    assert caplog.text.count(told) == expected // 2
    rejected = [r for r in read_records(tmp_path / "ledger.jsonl") if r["is"] == "rejected"]
    assert [(record["at"], record["why"]) for record in rejected] == [
        (position, "empty") for position in range(expected)
    ]


def texts(*prompts: int) -> list[str]:
    return [f"{prompt} {i}" for prompt in prompts for i in range(GROUP)]


def test_without_it_every_group_is_trained_on() -> None:
    samples, _, metrics, parts = run({1})
    assert samples == texts(0, 1) and metrics == {} and parts.seeds == [7]


def test_groups_without_signal_are_replaced() -> None:
    samples, scores, metrics, parts = run({1, 4}, dynamic_sampling=True)
    assert samples == texts(1, 4)
    assert scores.rewards_N == [1.0, 0.0, 0.0] * 2
    assert scores.parts == {"index": [1.0] * 3 + [4.0] * 3} and len(scores.errors) == 6
    assert parts.num_taken == 5 and len(set(parts.seeds)) == 4
    assert metrics == {
        "sampling/rounds": 4.0,
        "sampling/samples": 15.0,
        "sampling/kept_share": pytest.approx(6 / 15),
        "sampling/reward_mean": pytest.approx(2 / 15),
    }


def test_more_prompts_than_missing_take_fewer_rounds_and_surplus_groups_are_left_out() -> None:
    samples, _, metrics, parts = run({1, 2, 3}, dynamic_sampling=True, oversampling=2.0)
    assert samples == texts(1, 2) and metrics["sampling/rounds"] == 1 and parts.num_taken == 4


def test_after_the_last_round_what_there_is_is_trained_on(caplog: pytest.LogCaptureFixture) -> None:
    samples, _, metrics, _ = run({2}, dynamic_sampling=True, max_rounds=3)
    assert samples == texts(2) and metrics["sampling/rounds"] == 3
    assert "1 groups with differing rewards are missing after 3 rounds" in caplog.text
    samples, scores, metrics, _ = run(set(), dynamic_sampling=True, max_rounds=2)
    assert (
        samples == texts(2, 3)
        and len(scores.rewards_N) == 6
        and metrics["sampling/kept_share"] == 0
    )


def test_a_greedy_baseline_asks_for_a_greedy_response_to_each_prompt() -> None:
    samples, scores, _, parts = run({1, 2}, with_greedy=True, dynamic_sampling=True)
    assert samples == texts(1, 2) and scores.greedy_N == [1.0] * 6
    assert parts.seeds[0] == parts.seeds[1] == 7


NAN = float("nan")


def sample_with(
    reward: Callable[[Sequence[StoredSample]], Scores],
    role_part: str = "",
    rewards: RewardConfig | None = None,
    with_greedy: bool = False,
    **options: object,
) -> tuple[list[int], Scores, dict[str, float]]:
    """Return the prompts of a step of two groups of 4 with dynamic sampling, scores and metrics."""
    parts = Numbered()
    fields: dict[str, Any] = dict.fromkeys(Roles.__dataclass_fields__) | {"recovery": NO_RECOVERY}
    roles = Roles(**fields | {"prompts": parts, "generator": parts, "reward": reward})
    rollout = RolloutConfig(
        prompts_per_step=2, samples_per_prompt=4, dynamic_sampling=True, **cast(Any, options)
    )
    sampling = SamplingOptions(rollout, rewards or RewardConfig(), role_part, with_greedy)
    drawn = draw_rollout(sampling, roles, PhaseTimer(1), 7)
    prompts = [sample.prompt.index for sample in drawn.samples[::4]]
    return prompts, drawn.scores, dict(drawn.metrics)


def test_neither_a_crash_nor_a_penalty_makes_a_group_differ() -> None:
    """Prompt 0 is [1, 1, 1, crashed], prompt 1 all right with one too long; 2 and 3 differ."""
    tables = [
        ([1.0, 1.0, 1.0, NAN], [1.0, 1.0, 1.0, NAN]),
        ([1.0, 1.0, 1.0, 0.5], [1.0, 1.0, 1.0, 1.0]),
        ([1.0, 0.0, 1.0, NAN], [1.0, 0.0, 1.0, NAN]),
        ([0.5, 0.5, 0.0, 0.0], [1.0, 0.5, 0.0, 0.0]),
    ]

    def reward(samples: Sequence[StoredSample]) -> Scores:
        rewards = [tables[s.prompt.index][0][s.sample_index] for s in samples]
        unpenalized = [tables[s.prompt.index][1][s.sample_index] for s in samples]
        errors = ["late" * isnan(value) for value in rewards]
        return Scores(rewards, errors=errors, unpenalized_N=unpenalized)

    prompts, scores, metrics = sample_with(reward)
    assert prompts == [2, 3] and scores.has_outcome_N == [True, True, True, False, *[True] * 4]
    assert (metrics["reward/errors"], metrics["reward/failed_share"]) == (2, 2 / 16)
    assert metrics["sampling/reward_mean"] == pytest.approx((3 + 3.5 + 2 + 1) / 14)


def test_programs_and_their_tests_are_no_group() -> None:
    def reward(samples: Sequence[StoredSample]) -> Scores:
        is_test = [float(s.sample_index % 2) for s in samples]
        rewards = [
            1 - test if s.prompt.index < 2 else float(s.sample_index == 0)
            for s, test in zip(samples, is_test, strict=True)
        ]
        return Scores(rewards, {"is_test": is_test})

    assert sample_with(reward, "is_test")[0] == [2, 3]
    assert sample_with(reward)[0] == [0, 1]


def test_an_outage_of_rewards_ends_the_run_in_its_first_round() -> None:
    def reward(samples: Sequence[StoredSample]) -> Scores:
        calls.append(len(samples))
        return Scores([NAN] * len(samples), errors=["TimeoutError: no answer"] * len(samples))

    calls: list[int] = []
    message = r"^step 1: 8 of 8 rewards failed, .*=0.25; the first: 'TimeoutError: no answer'"
    with pytest.raises(RewardFailureError, match=message):
        sample_with(reward)
    assert calls == [8]
    bears = RewardConfig(max_failed_share=1)
    assert sample_with(reward, rewards=bears, max_rounds=3)[1].outcomes() == []


def test_a_greedy_response_without_a_reward_costs_its_prompt() -> None:
    def reward(samples: Sequence[StoredSample]) -> Scores:
        is_greedy = len({s.sample_index for s in samples}) == 1
        fails = [is_greedy and s.prompt.index == 0 for s in samples]
        rewards = [
            NAN if fail else float(s.sample_index == 0)
            for s, fail in zip(samples, fails, strict=True)
        ]
        return Scores(rewards, errors=["down" * fail for fail in fails])

    bears = RewardConfig(max_failed_share=0.5)
    prompts, scores, _ = sample_with(reward, rewards=bears, with_greedy=True)
    assert prompts == [1, 2] and scores.greedy_N == [1.0] * 8
