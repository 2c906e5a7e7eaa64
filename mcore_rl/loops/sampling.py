"""Samples of one step with their scores, drawn now or taken from what was drawn beside training; and the
weight sync in between.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from mcore_rl.config import Config
from mcore_rl.metrics import PhaseTimer
from mcore_rl.roles import Roles
from mcore_rl.rollout.staleness import staleness_metrics
from mcore_rl.types import Prompt, Sample, Scores, TrainBatch, WeightVersion

_log = logging.getLogger(__name__)
WAITING = ("rollout", "reward", "pause")
"""Phases in which the trainer ranks have nothing to do."""
ROUND_SEEDS = 1_000_003
"""Between the seeds of one step's rounds, which no step number reaches."""


def sample_step(
    config: Config, roles: Roles, timer: PhaseTimer, seed: int
) -> tuple[list[Sample], Scores, dict[str, float]]:
    """What the step trains on, and metrics of how it came about: sampled now, or beside the steps before."""
    options, version = config.rollout, WeightVersion(timer.step - 1)
    if roles.background is None:
        samples, scores, metrics = sample_now(config, roles, timer, seed)
    else:
        with timer("rollout"):
            samples, scores, metrics = roles.background.take(version)
    if roles.teacher is not None:
        with timer("teacher"):
            scores = replace(scores, teacher_N=roles.teacher(samples))
    bound = None if options.stale == "correct" else options.staleness_bound
    metrics |= staleness_metrics(samples, version, bound)
    return samples, scores, {**metrics, "idle/engines": roles.generator.idle_share()}


def sync_weights(
    roles: Roles, timer: PhaseTimer, version: WeightVersion, probe: TrainBatch
) -> dict[str, float]:
    """The engines' weights are the trainer's; what is sampled beside training goes on with them."""
    background = roles.background
    if background is not None:
        with timer("pause"):
            background.pause_for_sync()
    with timer("sync"):
        synced = roles.weights.sync(version, probe)
    return {**synced, **(background.resume(version) if background else {})}


def sample_now(
    config: Config, roles: Roles, timer: PhaseTimer, seed: int
) -> tuple[list[Sample], Scores, dict[str, float]]:
    """Samples from the engines' present weights, with dynamic sampling of as many rounds as it takes.

    DAPO, arXiv:2503.14476, section 3.2: groups whose rewards are all equal have no advantage; other prompts
    take their place until there are rollout.prompts_per_step, or rollout.max_rounds are over. Without any
    group that differs, the last round is trained on as it is.
    """
    options = config.rollout
    kept, kept_scores, sampled, all_rewards = [], Scores([]), 0, 0.0
    num_rounds, missing = 0, options.prompts_per_step
    while True:
        num_prompts = (
            math.ceil(missing * options.oversampling) if options.dynamic_sampling else missing
        )
        with timer("rollout"):
            prompts = roles.prompts.take(num_prompts)
            samples = roles.generator.generate(
                prompts,
                options.samples_per_prompt,
                greedy=False,
                seed=seed + num_rounds * ROUND_SEEDS,
            )
        with timer("reward"):
            scores = roles.reward(samples)
        if config.algorithm.advantage == "remax":
            scores = _with_greedy(scores, prompts, options.samples_per_prompt, roles, timer, seed)
        if not options.dynamic_sampling:
            return samples, scores, {}
        num_rounds, sampled = num_rounds + 1, sampled + len(samples)
        all_rewards += sum(scores.rewards_N)
        differing = groups_with_signal(scores.rewards_N, options.samples_per_prompt)
        chosen = differing[: missing * options.samples_per_prompt]
        kept, kept_scores = (
            [*kept, *(samples[i] for i in chosen)],
            kept_scores.joined(scores.select(chosen)),
        )
        missing = options.prompts_per_step - len(kept) // options.samples_per_prompt
        if not missing or num_rounds == options.max_rounds:
            break
    if missing:
        _log.warning(
            "%d groups with differing rewards are missing after %d rounds", missing, num_rounds
        )
    metrics = {
        "sampling/rounds": float(num_rounds),
        "sampling/samples": float(sampled),
        "sampling/kept_share": len(kept) / sampled,
        "sampling/reward_mean": all_rewards / sampled,
    }
    return (kept, kept_scores, metrics) if kept else (samples, scores, metrics)


def _with_greedy(
    scores: Scores,
    prompts: Sequence[Prompt],
    group_size: int,
    roles: Roles,
    timer: PhaseTimer,
    seed: int,
) -> Scores:
    """With the reward of each prompt's greedy response, at each sample of the prompt."""
    with timer("rollout"):
        greedy = roles.generator.generate(prompts, 1, greedy=True, seed=seed)
    with timer("reward"):
        rewards = roles.reward(greedy).rewards_N
    return replace(scores, greedy_N=[reward for reward in rewards for _ in range(group_size)])


def groups_with_signal(rewards_N: Sequence[float], group_size: int) -> list[int]:
    """Indices of the samples in groups, of `group_size` neighbours each, whose rewards differ."""
    groups = [range(i, i + group_size) for i in range(0, len(rewards_N), group_size)]
    return [i for group in groups if len({rewards_N[i] for i in group}) > 1 for i in group]
