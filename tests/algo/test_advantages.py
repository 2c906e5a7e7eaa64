"""Advantages against the published formulas, written out sample by sample and token by token in
float64.
"""

import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mcore_rl.algo.advantages import normalize, weights_of_groups
from mcore_rl.algo.lookup import advantages
from mcore_rl.algo.outcomes import Outcomes
from mcore_rl.algo.registry import Needs
from mcore_rl.config import AlgorithmConfig, PreferenceConfig
from tests.support.outcomes import Rows, outcomes_of

REWARDS = st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0, 1e3])
GROUPED = st.lists(
    st.tuples(REWARDS, st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=24
)


def peers_of(rows: Rows, group: int) -> list[tuple[float, int]]:
    return [(r, n) for r, g, n in rows if g == group]


def grpo(rows: Rows, i: int) -> float:
    peers = [r for r, _ in peers_of(rows, rows[i][1])]
    if len(set(peers)) == 1:
        return 0.0
    return (rows[i][0] - statistics.fmean(peers)) / (statistics.stdev(peers) + 1e-6)


def dr_grpo(rows: Rows, i: int) -> float:
    return rows[i][0] - statistics.fmean(r for r, _ in peers_of(rows, rows[i][1]))


def rloo(rows: Rows, i: int) -> float:
    others = [r for j, (r, g, _) in enumerate(rows) if g == rows[i][1] and j != i]
    return rows[i][0] - statistics.fmean(others) if others else 0.0


def opo(rows: Rows, i: int) -> float:
    peers = peers_of(rows, rows[i][1])
    total = sum(n for _, n in peers)
    return rows[i][0] - sum(n * r for r, n in peers) / total if total else 0.0


def gpg(rows: Rows, i: int) -> float:
    num_with_signal = sum(len({r for r, _ in peers_of(rows, g)}) > 1 for _, g, _ in rows)
    return dr_grpo(rows, i) * len(rows) / max(num_with_signal, 1)


def grpo_pass_k(rows: Rows, i: int) -> float:
    peers = sorted((r for r, _ in peers_of(rows, rows[i][1])), reverse=True)
    if len(peers) == 1 or peers[0] == peers[1] or rows[i][0] != peers[0]:
        return 0.0
    return (peers[0] - peers[1]) / (statistics.stdev(peers) + 1e-6)


BY_SAMPLE = {f.__name__: f for f in (grpo, dr_grpo, rloo, opo, gpg, grpo_pass_k)}


@pytest.mark.parametrize("name", BY_SAMPLE)
@given(rows=GROUPED)
@settings(max_examples=40)
def test_equals_the_formula_for_groups_of_any_size_in_any_order(name: str, rows: Rows) -> None:
    advantages_R = advantages[name](outcomes_of(rows), AlgorithmConfig())
    expected = [BY_SAMPLE[name](rows, i) for i, (_, _, n) in enumerate(rows) for _ in range(n)]
    assert advantages_R.dtype == torch.float32
    torch.testing.assert_close(
        advantages_R, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-5
    )


def whitened(values: list[float]) -> list[float]:
    if len(set(values)) <= 1:
        return [0.0] * len(values)
    mean = statistics.fmean(values)
    return [(v - mean) / (statistics.variance(values) + 1e-8) ** 0.5 for v in values]


@given(rows=GROUPED, gamma=st.sampled_from([1.0, 0.9]), seed=st.integers(0, 9))
@settings(max_examples=40)
def test_reinforce_plus_plus_is_the_normalized_reward_to_go(
    rows: Rows, gamma: float, seed: int
) -> None:
    num_tokens = sum(n for _, _, n in rows)
    penalties = torch.randn(num_tokens, generator=torch.Generator().manual_seed(seed)).tolist()
    to_go, left = [], list(penalties)
    for reward, _, n in rows:
        own, left = left[:n], left[n:]
        given_N = [*own[:-1], own[-1] + reward] if own else []
        to_go += [sum(gamma ** (u - t) * given_N[u] for u in range(t, n)) for t in range(n)]
    outcomes = outcomes_of(rows, penalties)
    advantages_R = normalize(
        advantages["reinforce_plus_plus"](outcomes, AlgorithmConfig(gamma=gamma))
    )
    expected = torch.tensor(whitened(to_go), dtype=torch.float32)
    torch.testing.assert_close(advantages_R, expected, rtol=1e-4, atol=1e-4)


@given(rows=GROUPED)
@settings(max_examples=40)
def test_reinforce_plus_plus_baseline_is_the_normalized_distance_to_the_groups_mean(
    rows: Rows,
) -> None:
    advantages_R = advantages["reinforce_plus_plus_baseline"](outcomes_of(rows), AlgorithmConfig())
    distances = [dr_grpo(rows, i) for i, (_, _, n) in enumerate(rows) for _ in range(n)]
    distances = [0.0 if abs(d) < 1e-9 else d for d in distances]
    expected = torch.tensor(whitened(distances), dtype=torch.float32)
    torch.testing.assert_close(advantages_R, expected, rtol=1e-4, atol=1e-4)


@given(rows=GROUPED, seed=st.integers(0, 9))
@example(rows=[(-2.0, 1, 0), (0.0, 1, 1), (0.1, 0, 1), (0.0, 0, 0)], seed=3)
@settings(max_examples=40)
def test_gdpo_is_the_normalized_sum_of_each_parts_grpo(rows: Rows, seed: int) -> None:
    other = (
        torch.randint(3, (len(rows),), generator=torch.Generator().manual_seed(seed))
        .double()
        .tolist()
    )
    rows_of_other = [(value, group, n) for value, (_, group, n) in zip(other, rows, strict=True)]
    rewards_N = torch.tensor([r for r, _, _ in rows], dtype=torch.float64)
    parts = [(1.0, rewards_N), (0.3, torch.tensor(other, dtype=torch.float64))]
    total_N = rewards_N + 0.3 * parts[1][1]
    outcomes = replace(outcomes_of(rows), rewards_N=total_N, parts=parts)
    sums = [grpo(rows, i) + 0.3 * grpo(rows_of_other, i) for i in range(len(rows))]
    tokens = [round(s, 12) for s, (_, _, n) in zip(sums, rows, strict=True) for _ in range(n)]
    expected = torch.tensor(whitened(tokens), dtype=torch.float32)
    torch.testing.assert_close(
        advantages["gdpo"](outcomes, AlgorithmConfig()), expected, rtol=1e-3, atol=1e-3
    )


def test_gdpo_counts_what_no_part_has() -> None:
    """The parts are alike, and the tokens of the first response are penalized."""
    outcomes = outcomes_of([(1.0, 0, 1), (1.0, 0, 1)], [-0.5, 0.0])
    outcomes = replace(outcomes, parts=[(1.0, torch.ones(2, dtype=torch.float64))])
    first, second = advantages["gdpo"](outcomes, AlgorithmConfig()).tolist()
    assert first < -0.5 and second == pytest.approx(-first)


def test_remax_is_the_reward_to_go_beyond_the_greedy_reward() -> None:
    outcomes = outcomes_of([(1.0, 0, 2), (0.0, 1, 1), (5.0, 1, 0)], [-0.1, -0.2, -0.3])
    outcomes = replace(outcomes, greedy_N=torch.tensor([0.5, 1.0, 1.0]))
    assert advantages["remax"](outcomes, AlgorithmConfig()).tolist() == pytest.approx(
        [0.2, 0.3, -1.3]
    )


@given(rows=GROUPED, seed=st.integers(0, 9))
@settings(max_examples=40)
def test_optimal_token_baseline_weighs_each_step_by_the_energy_so_far(
    rows: Rows, seed: int
) -> None:
    num_tokens = sum(n for _, _, n in rows)
    energy = torch.rand(
        num_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    outcomes = replace(outcomes_of(rows), energy_R=energy)
    starts = [sum(n for _, _, n in rows[:i]) for i in range(len(rows))]

    def weight(i: int, t: int) -> float:
        return energy[starts[i] : starts[i] + t + 1].sum().item()

    expected = []
    for reward, group, n in rows:
        for t in range(n):
            there = [i for i, (_, g, m) in enumerate(rows) if g == group and m > t]
            total = sum(weight(i, t) for i in there) + 1e-8
            baseline = (
                sum(weight(i, t) * rows[i][0] for i in there) / total if len(there) > 1 else 0.0
            )
            expected.append(reward - baseline)
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        advantages_R = advantages[name](outcomes, AlgorithmConfig())
        torch.testing.assert_close(advantages_R, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_known_values() -> None:
    outcomes = outcomes_of([(1.0, 7, 1), (0.0, 7, 1), (0.0, 7, 1), (0.0, 7, 1)])

    def of(name: str) -> list[float]:
        return advantages[name](outcomes, AlgorithmConfig()).tolist()

    assert of("grpo") == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert of("dr_grpo") == [0.75, -0.25, -0.25, -0.25]
    assert of("rloo") == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert of("grpo_pass_k") == pytest.approx([2.0, 0.0, 0.0, 0.0], abs=1e-5)


def test_what_tokens_bring_counts_toward_the_reward_of_the_sample() -> None:
    rows = [(1.0, 0, 2), (0.0, 0, 1)]
    got = advantages["dr_grpo"](outcomes_of(rows, [-0.25, -0.25, 0.1]), AlgorithmConfig())
    assert got.tolist() == pytest.approx([0.2, 0.2, -0.2])


@pytest.mark.parametrize("name", [*BY_SAMPLE, "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("reward", [0.1, 1e8 + 0.1, -3.3])
def test_equal_rewards_and_groups_of_one_get_exactly_zero(name: str, reward: float) -> None:
    rows = [(reward, 0, i + 1) for i in range(7)] + [(5.0, 1, 2)]
    assert not advantages[name](outcomes_of(rows), AlgorithmConfig()).any()


def test_every_advantage_is_tested() -> None:
    others = [
        "distillation",
        "dpo",  # in test_preferences.py
        "gae",  # in test_values.py
        "gdpo",
        "optimal_token_baseline",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "tir_optimal_token_baseline",
    ]
    assert advantages.names == sorted([*BY_SAMPLE, *others])


def test_refuses_what_has_no_advantage() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    with pytest.raises(ValueError, match=r"samples \[1\] are not finite"):
        Outcomes(torch.tensor([0.0, float("nan")]), two, two.long())
    with pytest.raises(ValueError, match=r"are \(1,\), \(2,\), \(2,\)"):
        Outcomes(one, two, two)
    with pytest.raises(ValueError, match=r"token rewards \(1,\) for 4 tokens"):
        Outcomes(two, two, torch.tensor([1, 3]), one)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"algorithm.advantage='gpro' \(did you mean 'grpo'\?\).*'dr_grpo'"
    ):
        advantages["gpro"]


@given(st.lists(st.floats(-1e3, 1e3), max_size=12))
def test_normalized_values_have_mean_0_and_variance_1_or_are_0(values: list[float]) -> None:
    result_R = normalize(torch.tensor(values, dtype=torch.float64))
    assert (result_R.dtype, len(result_R)) == (torch.float32, len(values))
    if len(set(values)) <= 1:
        assert not result_R.any()
    else:
        torch.testing.assert_close(result_R, torch.tensor(whitened(values)), rtol=1e-4, atol=1e-4)


def test_preference_weights_of_a_group_oppose_each_other_and_equal_rewards_get_none() -> None:
    rows = [(1.0, 0, 1), (0.0, 0, 1), (1.0, 1, 1), (1.0, 1, 1)]
    scored = replace(
        outcomes_of(rows), logprobs_R=torch.full((4,), -1.0), ref_logprobs_R=torch.full((4,), -1.0)
    )
    weights_N, _ = weights_of_groups(scored, PreferenceConfig())
    better, worse, *equal = weights_N.tolist()
    assert better > 0 and worse == pytest.approx(-better)
    assert equal == [0.0, 0.0]
    with pytest.raises(ValueError, match="advantage=dpo needs log-probs of the policy"):
        weights_of_groups(outcomes_of(rows), PreferenceConfig())


def test_what_compares_samples_of_a_prompt_says_so() -> None:
    """With one sample a prompt its advantages are 0; those of others are not."""
    lens_N = torch.tensor([2, 3, 1])
    outcomes = Outcomes(torch.tensor([0.0, 1.0, 3.0]), lens_N, torch.arange(3))
    compared, others = set(), set()
    for name in advantages.names:
        needs = advantages.needs(name)
        if needs in (Needs(), Needs(others=True)):
            is_nothing = not advantages[name](outcomes, AlgorithmConfig()).any()
            (compared if needs.others else others).add((name, is_nothing))
    assert {name for name, _ in compared} >= {"grpo", "rloo"} and all(zero for _, zero in compared)
    assert ("reinforce_plus_plus", False) in others and not any(zero for _, zero in others)
