"""Gets a step's samples and scores, drawn now or in the background, and syncs the weights."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mcore_rl.config import RolloutConfig
from mcore_rl.loops.resampling import score
from mcore_rl.metrics import PhaseTimer
from mcore_rl.roles import Batch, Roles, Samples
from mcore_rl.rollout.staleness import staleness_metrics
from mcore_rl.scores import Scores
from mcore_rl.types import Prompt, WeightVersion

_log = logging.getLogger(__name__)
WAITING = ("rollout", "reward", "pause")
"""Phases in which the trainer ranks are idle."""
ROUND_SEEDS = 1_000_003
"""Distance between the seeds of one step's rounds; larger than any step number."""


def sample_step(
    options: RolloutConfig, roles: Roles, timer: PhaseTimer, seed: int, with_greedy: bool = False
) -> tuple[list[Any], Scores, dict[str, float]]:
    """Return (samples, scores, metrics) for the step to train on.

    with_greedy   also score a greedy response to each prompt; background sampling decides this for
                  itself
    """
    version = WeightVersion(timer.step - 1)
    if roles.background is None:
        samples, scores, metrics = sample_now(options, roles, timer, seed, with_greedy)
    else:
        with timer("rollout"):
            samples, scores, metrics = roles.background.take(version)
    bound = None if options.stale == "correct" else options.staleness_bound
    metrics |= staleness_metrics(samples, version, bound)
    metrics["rollout/lost"] = metrics.get("rollout/lost", 0.0) + roles.generator.take_num_lost()
    return samples, scores, {**metrics, "idle/engines": roles.generator.idle_share()}


def sync_weights(
    roles: Roles, timer: PhaseTimer, version: WeightVersion, probe: Batch
) -> dict[str, float]:
    """Bring the trainer's weights to the engines; background sampling pauses and continues with
    them.
    """
    background = roles.background
    if background is not None:
        with timer("pause"):
            background.pause_for_sync()
    with timer("sync"):
        metrics = dict(roles.weights.sync(version, probe))
    if background is not None:
        metrics |= background.resume(version)
    return metrics


@dataclass
class Rounds:
    """Samples that the rounds of dynamic sampling have drawn and kept so far."""

    kept: list[Any] = field(default_factory=list)
    kept_scores: Scores = field(default_factory=lambda: Scores([]))
    num_rounds: int = 0
    num_sampled: int = 0
    reward_sum: float = 0.0

    def add(self, samples: Samples, scores: Scores, kept: Sequence[int]) -> None:
        """Count a round and keep its samples at the indices `kept`."""
        self.num_rounds += 1
        self.num_sampled += len(samples)
        self.reward_sum += sum(scores.rewards_N)
        self.kept += [samples[i] for i in kept]
        self.kept_scores = self.kept_scores.joined(scores.select(kept))

    def metrics(self) -> dict[str, float]:
        return {
            "sampling/rounds": float(self.num_rounds),
            "sampling/samples": float(self.num_sampled),
            "sampling/kept_share": len(self.kept) / self.num_sampled,
            "sampling/reward_mean": self.reward_sum / self.num_sampled,
        }


def sample_now(
    options: RolloutConfig, roles: Roles, timer: PhaseTimer, seed: int, with_greedy: bool = False
) -> tuple[list[Any], Scores, dict[str, float]]:
    """Sample from the engines' present weights; with dynamic sampling in as many rounds as it
    takes.

    DAPO, arXiv:2503.14476, section 3.2: groups whose rewards are all equal have no advantage, so
    further prompts are sampled until rollout.prompts_per_step groups differ in reward or
    rollout.max_rounds are over. If no group differs, the last round is returned as it is.
    """
    group_size = options.samples_per_prompt
    if not options.dynamic_sampling:
        samples, scores = _sample_round(
            options.prompts_per_step, group_size, roles, timer, seed, with_greedy
        )
        return samples, scores, {}
    rounds = Rounds()
    missing = options.prompts_per_step
    while True:
        samples, scores = _sample_round(
            math.ceil(missing * options.oversampling),
            group_size,
            roles,
            timer,
            seed + rounds.num_rounds * ROUND_SEEDS,
            with_greedy,
        )
        differing = groups_with_signal(scores.rewards_N, group_size)
        rounds.add(samples, scores, differing[: missing * group_size])
        missing = options.prompts_per_step - len(rounds.kept) // group_size
        if not missing or rounds.num_rounds == options.max_rounds:
            break
    if missing:
        _log.warning(
            "%d groups with differing rewards are missing after %d rounds",
            missing,
            rounds.num_rounds,
        )
    if rounds.kept:
        samples, scores = rounds.kept, rounds.kept_scores
    return samples, scores, rounds.metrics()


def _sample_round(
    num_prompts: int,
    group_size: int,
    roles: Roles,
    timer: PhaseTimer,
    seed: int,
    with_greedy: bool,
) -> tuple[list[Any], Scores]:
    """Sample and score `group_size` responses to each of the next prompts."""
    with timer("rollout"):
        prompts = roles.prompts.take(num_prompts)
        samples = roles.generator.generate(prompts, group_size, greedy=False, seed=seed)
    with timer("reward"):
        generator, reward = roles.generator, roles.reward
        samples, scores = score(generator, reward, prompts, samples, greedy=False, seed=seed)
    roles.prompts.note_scores(prompts, scores)
    if with_greedy:
        scores = _with_greedy(scores, prompts, group_size, roles, timer, seed)
    return samples, scores


def _with_greedy(
    scores: Scores,
    prompts: Sequence[Prompt],
    group_size: int,
    roles: Roles,
    timer: PhaseTimer,
    seed: int,
) -> Scores:
    """Add the reward of each prompt's greedy response, repeated at each sample of the prompt."""
    with timer("rollout"):
        greedy = roles.generator.generate(prompts, 1, greedy=True, seed=seed)
    with timer("reward"):
        generator, reward = roles.generator, roles.reward
        _, scored = score(generator, reward, prompts, greedy, greedy=True, seed=seed)
    greedy_N = [value for value in scored.rewards_N for _ in range(group_size)]
    return replace(scores, greedy_N=greedy_N)


def groups_with_signal(rewards_N: Sequence[float], group_size: int) -> list[int]:
    """Return the indices of all samples in groups whose rewards differ; `group_size` neighbors are
    a group.
    """
    indices: list[int] = []
    for start in range(0, len(rewards_N), group_size):
        group = range(start, start + group_size)
        if len({rewards_N[i] for i in group}) > 1:
            indices += group
    return indices
