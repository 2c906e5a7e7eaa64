"""Noise of a rehearsal: the same for the same sample, different for others, evenly spread."""

from dataclasses import replace
from statistics import fmean

from mcore_rl.rewards.scorer import noise_of
from tests.support.samples import make_sample


def test_noise_depends_on_prompt_response_and_part_alone() -> None:
    sample = make_sample(0, "a")
    noise = noise_of(sample, "score")
    assert noise_of(replace(sample, text="b", sample_index=3), "score") == noise
    others = [
        noise_of(sample, "form"),
        noise_of(replace(sample, response_ids=(6,)), "score"),
        noise_of(replace(sample, prompt=replace(sample.prompt, token_ids=(1,))), "score"),
    ]
    assert len({noise, *others}) == 4


def test_noise_is_spread_over_the_unit_interval() -> None:
    sample = make_sample(0, "a")
    noises = [noise_of(replace(sample, response_ids=(token,)), "score") for token in range(1000)]
    assert 0 <= min(noises) < 0.01 and 0.99 < max(noises) < 1
    assert abs(fmean(noises) - 0.5) < 0.03
