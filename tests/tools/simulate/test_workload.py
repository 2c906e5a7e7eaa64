"""Made-up prompts, lengths and rewards."""

from dataclasses import replace
from statistics import fmean, stdev

import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.tools.simulate.workload import NUM_PROMPTS, SimulatedPrompts, Workload
from mcore_rl.types import GroupLease, StoredSample, VersionSpan, WeightVersion

CONFIG = load_recipe(
    "qwen3_30b_a3b_grpo_32", ["simulate.response_len=1000", "simulate.response_spread=0.5"]
)


def test_lengths_have_the_mean_and_the_cut_that_the_recipe_says() -> None:
    workload = Workload(CONFIG.simulate, CONFIG.rollout.max_response_len, CONFIG.run.seed)
    lens = [workload.response_len(p, s) for p in range(1000) for s in range(4)]
    assert fmean(lens) == pytest.approx(1000, rel=0.05)
    assert stdev(lens) == pytest.approx(1000 * (2.718**0.25 - 1) ** 0.5, rel=0.1)
    short = Workload(CONFIG.simulate, 900, CONFIG.run.seed)
    ended = [short.finish(p, 0) for p in range(200)]
    assert ended == [workload.finish(p, 0, longest=900) for p in range(200)]
    assert {reason for _, reason in ended} == {"stop", "length"}
    assert all((num == 900) == (reason == "length") for num, reason in ended if num >= 900)


def test_without_a_spread_all_lengths_are_equal() -> None:
    even = Workload(
        replace(CONFIG.simulate, response_spread=0.0),
        CONFIG.rollout.max_response_len,
        CONFIG.run.seed,
    )
    assert {even.response_len(p, s) for p in range(9) for s in range(9)} == {1000}


def test_prompts_differ_in_how_often_their_samples_are_right() -> None:
    workload = Workload(CONFIG.simulate, CONFIG.rollout.max_response_len, CONFIG.run.seed)
    prompts = SimulatedPrompts(7)
    assert len(prompts) == NUM_PROMPTS and len(prompts[3].token_ids) == 7
    spans = (VersionSpan(0, 1, WeightVersion(0)),)
    rates = [
        fmean(
            workload.scores(
                [
                    StoredSample(prompts[p], s, 1, "stop", spans, False, GroupLease(0, p))
                    for s in range(32)
                ]
            ).rewards_N
        )
        for p in range(64)
    ]
    assert min(rates) < 0.15 and max(rates) > 0.85
    assert fmean(rates) == pytest.approx(0.5, abs=0.1)
