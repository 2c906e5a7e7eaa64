"""Samples responses to held-out prompts, and computes greedy accuracy and pass@k."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.algo.pass_at_k import pass_at_k
from mcore_rl.config import EvalConfig, RewardConfig
from mcore_rl.loops.resampling import sample_and_score
from mcore_rl.roles import Generator, Reward
from mcore_rl.scores import Scores
from mcore_rl.types import Prompt

TOLERANCE = 1e-6
"""Slack below the threshold, for the rounding of weighted sums."""


@dataclass(frozen=True)
class Correctness:
    """Decides which answers are right: those whose number is at least `threshold`.

    The number is the part `part` of the reward, or without one the reward before penalties. Neither
    the overlong penalty nor a KL counts. A sample whose reward failed is never right.
    """

    part: str
    threshold: float

    @staticmethod
    def of(config: EvalConfig, reward: RewardConfig) -> "Correctness":
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

    def are_correct(self, scores: Scores) -> list[bool]:
        """Return one truth value per sample.

        Raises ValueError if rewards have no such part and did not all fail.
        """
        errors = scores.errors or [""] * len(scores.rewards_N)
        return [
            not error and value >= self.threshold - TOLERANCE
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
    correctness: Correctness,
    *,
    pass_k: int,
    seed: int,
) -> tuple[dict[str, float], list[Any], Scores]:
    """Return metrics over `prompts`, with the greedy samples and their scores; no metrics without
    prompts.

    eval/greedy_accuracy   share of the greedy samples that are right
    eval/greedy_reward     mean reward of the greedy samples
    eval/pass_at_<k>       unbiased estimates for k = 1 and `pass_k` from `pass_k` samples at the
                           rollout temperature, if pass_k > 1 (arXiv:2107.03374, eq. 1)
    """
    if not prompts:
        return {}, [], Scores([])
    greedy, scores = sample_and_score(generator, reward, prompts, 1, greedy=True, seed=seed)
    metrics = {
        "eval/greedy_accuracy": sum(correctness.are_correct(scores)) / len(greedy),
        "eval/greedy_reward": sum(scores.rewards_N) / len(greedy),
        "eval/prompts": float(len(prompts)),
        "eval/reward_errors": scores.metrics()["reward/errors"],
    }
    if pass_k > 1:
        _, sampled = sample_and_score(generator, reward, prompts, pass_k, greedy=False, seed=seed)
        metrics |= pass_metrics(correctness.are_correct(sampled), pass_k)
    return metrics, greedy, scores


def pass_metrics(are_correct: Sequence[bool], num_samples: int) -> dict[str, float]:
    """Return the mean pass@1 and pass@num_samples over prompts with `num_samples` neighboring
    samples each.
    """
    groups = [are_correct[i : i + num_samples] for i in range(0, len(are_correct), num_samples)]
    metrics = {}
    for k in (1, num_samples):
        estimates = [pass_at_k(len(group), sum(group), k) for group in groups]
        metrics[f"eval/pass_at_{k}"] = sum(estimates) / len(estimates)
    return metrics
