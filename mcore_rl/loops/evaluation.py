"""Held-out evaluation: prompts in, greedy accuracy and pass@k out."""

from collections.abc import Sequence

from mcore_rl.algo.pass_at_k import pass_at_k
from mcore_rl.config import EvalConfig
from mcore_rl.roles import Generator, Reward
from mcore_rl.types import Prompt, Sample, Scores


def evaluate(
    generator: Generator, prompts: Sequence[Prompt], reward: Reward, config: EvalConfig, seed: int
) -> tuple[dict[str, float], list[Sample], Scores]:
    """Metrics over `prompts`, with the greedy samples and their scores. No prompts, no metrics.

    eval/greedy_accuracy is the share of greedy samples with a positive reward; eval/greedy_reward their mean
    reward; eval/pass_at_<k> the unbiased estimate from config.pass_k samples at the rollout temperature
    (arXiv:2107.03374, eq. 1).
    """
    if not prompts:
        return {}, [], Scores([])
    greedy = generator.generate(prompts, 1, greedy=True, seed=seed)
    scores = reward(greedy)
    rewards_N = scores.rewards_N
    metrics = {
        "eval/greedy_accuracy": sum(r > 0 for r in rewards_N) / len(rewards_N),
        "eval/greedy_reward": sum(rewards_N) / len(rewards_N),
        "eval/prompts": float(len(prompts)),
        "eval/reward_errors": scores.metrics()["reward/errors"],
    }
    if config.pass_k > 1:
        sampled = reward(
            generator.generate(prompts, config.pass_k, greedy=False, seed=seed)
        ).rewards_N
        groups = [sampled[i : i + config.pass_k] for i in range(0, len(sampled), config.pass_k)]
        for k in (1, config.pass_k):
            estimates = [pass_at_k(len(group), sum(r > 0 for r in group), k) for group in groups]
            metrics[f"eval/pass_at_{k}"] = sum(estimates) / len(estimates)
    return metrics, greedy, scores
