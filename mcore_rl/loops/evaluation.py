"""Samples responses to held-out prompts, and computes greedy accuracy and pass@k."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb
from statistics import fmean

from mcore_rl.config import EvalConfig, RewardConfig
from mcore_rl.loops.outcomes import RewardFailures, Rollout
from mcore_rl.loops.resampling import sample_and_score
from mcore_rl.loops.roles import Generator, Reward
from mcore_rl.types import Prompt
from mcore_rl.types.scores import Scores

TOLERANCE = 1e-6
"""Slack below the threshold, for the rounding of weighted sums."""


@dataclass(frozen=True)
class Correctness:
    """Decides which answers are right: those whose number is at least `threshold`.

    The number is the part `part` of the reward, or without one the reward before penalties. Neither
    the overlong penalty nor a KL counts.
    """

    part: str
    threshold: float

    @staticmethod
    def from_config(config: EvalConfig, reward: RewardConfig) -> "Correctness":
        """Take `eval.correct_part` and `eval.correct_at`; by default full marks are needed.

        Full marks are 1 for a part or for the only score, reward.judge.high for a judge's verdict,
        and the sum of the positive weights times these for a reward of several parts.
        """
        if config.correct_at is not None:
            return Correctness(config.correct_part, config.correct_at)
        if config.correct_part or not reward.parts:
            return Correctness(config.correct_part, _full_marks(config.correct_part, reward))
        weighted = (
            max(weight, 0.0) * _full_marks(part, reward)
            for part, weight in reward.part_weights.items()
        )
        return Correctness("", sum(weighted))

    def are_correct(self, scores: Scores) -> list[bool | None]:
        """Return one truth value per sample; None if its reward or number failed, so that nobody
        knows.

        Raises ValueError if rewards have no such part and did not all fail.
        """
        errors = scores.errors or [""] * len(scores.rewards_N)
        return [
            None if error or not math.isfinite(value) else value >= self.threshold - TOLERANCE
            for value, error in zip(self._numbers(scores, errors), errors, strict=True)
        ]

    def _numbers(self, scores: Scores, errors: Sequence[str]) -> Sequence[float]:
        if self.part in scores.parts:
            return scores.parts[self.part]
        if self.part in ("", "score") or all(errors):
            return scores.unpenalized_N
        raise ValueError(
            f"eval.correct_part={self.part}: the reward gives no such number; it gives"
            f" {', '.join(sorted(scores.parts)) or 'score'}"
        )


def _full_marks(part: str, reward: RewardConfig) -> float:
    """Return the most that a number is worth: 1, or the upper bound of a judge's verdict."""
    is_judge = part == "judge" or (not part and not reward.path)
    return reward.judge.high if is_judge else 1.0


def evaluate(
    generator: Generator,
    prompts: Sequence[Prompt],
    reward: Reward,
    config: EvalConfig,
    rewards: RewardConfig,
    *,
    seed: int,
) -> tuple[dict[str, float], Rollout]:
    """Return metrics over `prompts`, and the greedy samples with their scores; no metrics without
    prompts.

    eval/greedy_accuracy   share of the greedy samples that are right
    eval/greedy_reward     mean reward of the greedy samples, before penalties
    eval/avg_at_<n>        share of n samples of a prompt that are right, mean over prompts
    eval/pass_at_<k>       unbiased estimates for k = 1 and eval.pass_k (arXiv:2107.03374, eq. 1)
    eval/<set>/...         the same of the prompts of one set of eval.sets; those that another model
                           than the policy answers count here alone

    Samples whose reward failed are neither right nor wrong: they are left out and counted. Raises
    RewardFailureError if more failed than `rewards`, how they are made, allows.
    """
    if not prompts:
        return {}, Rollout([], Scores([]))
    correctness = Correctness.from_config(config, rewards)
    failures = RewardFailures()

    def draw(num_samples: int, greedy: bool) -> Rollout:
        drawn = sample_and_score(
            generator, reward, prompts, num_samples, greedy=greedy, seed=seed, for_eval=True
        )
        failures.note(drawn.scores)
        failures.check(rewards, "evaluation")
        # Penalties are for training: theirs is the length of a training response.
        return replace(drawn, scores=drawn.scores.without_penalties())

    greedy = draw(1, greedy=True)
    sampled = draw(config.num_samples, greedy=False) if config.num_samples else None
    right_N = correctness.are_correct(greedy.scores)
    sampled_N = correctness.are_correct(sampled.scores) if sampled else []
    metrics: dict[str, float] = {}
    for name, chosen in _choose_by_set(prompts, config).items():
        measured = _measure_greedy(greedy.scores, right_N, chosen)
        if sampled:
            measured |= _measure_sampled(sampled_N, chosen, config)
        prefix = f"eval/{name}/" if name else "eval/"
        metrics |= {prefix + metric: value for metric, value in measured.items()}
    metrics["eval/reward_errors"] = float(failures.num_failed)
    return metrics, greedy


def _choose_by_set(prompts: Sequence[Prompt], config: EvalConfig) -> dict[str, list[int]]:
    """Return which prompts count in the metrics of each set, and of all that the policy answers."""
    apart = {each.name for each in config.sets if each.model != "policy"}
    by_set: dict[str, list[int]] = {"": []}
    for i, prompt in enumerate(prompts):
        if prompt.set_name not in apart:
            by_set[""].append(i)
        if prompt.set_name:
            by_set.setdefault(prompt.set_name, []).append(i)
    return by_set


def _measure_sampled(
    right_N: Sequence[bool | None], chosen: Sequence[int], config: EvalConfig
) -> dict[str, float]:
    """Return the metrics of the other samples of the chosen prompts."""
    num_samples = config.num_samples
    right = [right_N[i * num_samples + j] for i in chosen for j in range(num_samples)]
    return pass_metrics(right, num_samples, config.pass_k)


def _measure_greedy(
    scores: Scores, right_N: Sequence[bool | None], chosen: Sequence[int]
) -> dict[str, float]:
    """Return the metrics of the greedy samples of the chosen prompts."""
    metrics = {"prompts": float(len(chosen))}
    if known := [right for i in chosen if (right := right_N[i]) is not None]:
        metrics["greedy_accuracy"] = fmean(known)
    if outcomes := scores.select(chosen).outcomes():
        metrics["greedy_reward"] = fmean(outcomes)
    return metrics


def pass_metrics(
    are_correct: Sequence[bool | None], num_samples: int, pass_k: int
) -> dict[str, float]:
    """Return avg@n and mean pass@k over prompts with n = `num_samples` neighboring samples each.

    A sample of which nobody knows is left out. A prompt with fewer than k others tells nothing of
    pass@k, so prompts_at_<k> counts the prompts that do; without any there is no estimate.
    """
    groups = [
        [right for right in are_correct[i : i + num_samples] if right is not None]
        for i in range(0, len(are_correct), num_samples)
    ]
    metrics: dict[str, float] = {}
    if shares := [fmean(group) for group in groups if group]:
        metrics[f"avg_at_{num_samples}"] = fmean(shares)
    for k in sorted({1, pass_k}):
        known = [group for group in groups if len(group) >= k]
        metrics[f"prompts_at_{k}"] = float(len(known))
        if known:
            estimates = [pass_at_k(len(group), sum(group), k) for group in known]
            metrics[f"pass_at_{k}"] = fmean(estimates)
    return metrics


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that k of n samples, c of them right, include a right
    one.

    Unbiased; Chen et al., arXiv:2107.03374, eq. 1. Raises ValueError unless 0 <= c <= n and 1 <= k
    <= n.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(
            f"pass@{k} of {num_samples} samples, {num_correct} correct: need 0 <= c <= n, 1 <= k"
            " <= n"
        )
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)
