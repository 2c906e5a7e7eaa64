"""Options of the engines: what contradicts what, and what follows from them."""

from typing import Any

import pytest

from mcore_rl.config.rollout import RolloutConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3, "ep": 2}, "rollout.ep=2 does not divide rollout.tp=3"),
        ({"tp": 3, "attention_dp": 2}, "rollout.attention_dp=2 does not divide rollout.tp=3"),
        (
            {"tp": 4, "nodes_per_engine": 3},
            r"rollout.nodes_per_engine=3 does not divide rollout.tp \* rollout.pp = 4",
        ),
        (
            {"mode": "async", "max_in_flight": 4},
            "rollout.max_in_flight=4: .* rollout.samples_per_prompt=8, must fit",
        ),
        (
            {"mode": "async", "deterministic": True},
            "rollout.deterministic=true: .* use rollout.mode=one_step_off or sync",
        ),
        ({"mode": "async", "pp": 2}, "rollout.pp=2: .* use rollout.partial=wait"),
    ],
)
def test_options_that_contradict_one_another_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 4, "ep": 2, "attention_dp": 4, "nodes_per_engine": 2},
        {"tp": 2, "pp": 2, "nodes_per_engine": 4},
        {"mode": "async", "max_in_flight": 8},
        {"mode": "one_step_off", "deterministic": True},
        {"mode": "async", "pp": 2, "partial": "wait"},
        {"mode": "sync", "pp": 2},
    ],
)
def test_the_remedies_are_allowed(options: dict[str, Any]) -> None:
    config = RolloutConfig(**options)
    assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize(("mode", "bound"), [("sync", 0), ("one_step_off", 1), ("async", 3)])
def test_max_staleness_bounds_only_asynchronous_samples(mode: Any, bound: int) -> None:
    assert RolloutConfig(mode=mode, max_staleness=3).staleness_bound == bound


def test_an_engine_has_a_gpu_for_each_of_its_ranks() -> None:
    assert RolloutConfig(engines=5, tp=4, ep=2, pp=3, attention_dp=2).engine_ranks == 12


@pytest.mark.parametrize(
    ("options", "cuts"), [({}, False), ({"top_p": 0.9}, True), ({"top_k": 20}, True)]
)
def test_top_p_and_top_k_cut_the_distribution(options: dict[str, Any], cuts: bool) -> None:
    assert RolloutConfig(**options).cuts_distribution == cuts
