"""Gets a step's samples and scores, drawn now or in the background, and syncs the weights."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean

from mcore_rl.algo.lookup import needs_of
from mcore_rl.config import AlgorithmConfig, RewardConfig, RolloutConfig
from mcore_rl.logs.ledger.ledger import EMPTY, LOST
from mcore_rl.logs.logger import PhaseTimer
from mcore_rl.loops.outcomes import RewardFailures, Rollout, has_tokens
from mcore_rl.loops.resampling import score
from mcore_rl.loops.roles import Roles
from mcore_rl.types import Prompt, StoredBatch, StoredSample, WeightVersion, list_ends
from mcore_rl.types.scores import Scores, join_scores

_log = logging.getLogger(__name__)
WAITING = ("rollout", "reward", "pause")
"""Phases in which the trainer ranks are idle."""
ROUND_SEEDS = 1_000_003
"""Distance between the seeds of one step's rounds; larger than any step number."""
MAX_DRAWS = 3
"""Draws of a step without a token to train on: a lost engine ends all episodes of a small step."""


@dataclass(frozen=True)
class SamplingOptions:
    """The parts of a recipe that say how a step's samples are drawn, and which groups have signal.

    reward        how many rewards may fail
    role_part     algorithm.role_part
    with_greedy   also score a greedy response to each prompt, for advantages that need it
    """

    rollout: RolloutConfig
    reward: RewardConfig = field(default_factory=RewardConfig)
    role_part: str = ""
    with_greedy: bool = False

    @staticmethod
    def make(
        rollout: RolloutConfig, reward: RewardConfig, algorithm: AlgorithmConfig
    ) -> "SamplingOptions":
        with_greedy = needs_of(algorithm).greedy_baseline
        return SamplingOptions(rollout, reward, algorithm.role_part, with_greedy)

    def groups_with_signal(self, scores: Scores) -> list[int]:
        """Return the indices of all samples in groups that differ."""
        return groups_with_signal(scores, self.rollout.samples_per_prompt, self.role_part)


def draw_rollout(options: SamplingOptions, roles: Roles, timer: PhaseTimer, seed: int) -> Rollout:
    """Return samples for the step to train on, drawn now or in the background, with their scores.

    Samples are drawn anew, from other prompts, if no sample has a token to train on. Raises
    RewardFailureError if more rewards failed than the recipe bears.
    """
    version = WeightVersion(timer.step - 1)
    rollout = options.rollout
    drawn = _draw(options, roles, timer, seed)
    for number in range(1, MAX_DRAWS):
        if has_tokens(drawn):
            break
        _reject_empty(drawn, roles, timer.step)
        drawn = _draw(options, roles, timer, seed + number * rollout.max_rounds * ROUND_SEEDS)
    bound = None if rollout.stale == "correct" else rollout.staleness_bound
    metrics = {**drawn.metrics, **measure_staleness(drawn.samples, version, bound)}
    metrics["rollout/lost"] = metrics.get("rollout/lost", 0.0) + roles.generator.take_num_lost()
    return replace(drawn, metrics=metrics | roles.generator.measure_engines())


def draw_again(
    options: SamplingOptions, roles: Roles, timer: PhaseTimer, lost: Rollout, seed: int
) -> Rollout:
    """Return samples for a step that has lost all of its own.

    They are drawn from the same prompts. Where the background draws, the step takes what it has
    drawn since, and the ledger tells which prompts are lost.
    """
    if roles.background is None:
        roles.generator.note_lost(len(lost.samples))
        prompts = [sample.prompt for sample in lost.samples[:: options.rollout.samples_per_prompt]]
        drawn = _sample_prompts(prompts, options, roles, timer, seed)
        num_lost = {"rollout/lost": float(roles.generator.take_num_lost())}
        return replace(drawn, metrics={**lost.metrics, **num_lost})
    for position in dict.fromkeys(sample.prompt.position for sample in lost.samples):
        roles.ledger.reject(position, LOST)
    return draw_rollout(options, roles, timer, seed)


def _draw(options: SamplingOptions, roles: Roles, timer: PhaseTimer, seed: int) -> Rollout:
    if roles.background is None:
        return sample_now(options, roles, timer, seed)
    take = partial(roles.background.take, WeightVersion(timer.step - 1))
    with timer("rollout"):
        return Rollout(*roles.recovery.repeat(take))


def _reject_empty(drawn: Rollout, roles: Roles, step: int) -> None:
    """Say, and enter into the ledger, that a step has no token to train on."""
    _log.warning(
        "step %d: none of %d samples has a token to train on (%s); drawing from the next prompts",
        step,
        len(drawn.samples),
        list_ends(drawn.samples),
    )
    for position in dict.fromkeys(sample.prompt.position for sample in drawn.samples):
        roles.ledger.reject(position, EMPTY)


def measure_staleness(
    samples: Sequence[StoredSample], version: WeightVersion, bound: int | None
) -> dict[str, float]:
    """Return the ages of non-empty `samples` when weights `version` train on them.

    A sample is as old as its oldest token. Fails an assertion if one is older than `bound` (None:
    no bound).
    """
    ages = []
    num_partial = 0
    for sample in samples:
        versions = {span.version for span in sample.versions}
        num_partial += len(versions) > 1
        if sample.response_len:
            ages.append(version - min(versions))
    oldest = max(ages, default=0)
    if bound is not None:
        assert oldest <= bound, f"samples of age {ages} for version {version}, bound {bound}"
    return {
        "staleness/mean": fmean(ages) if ages else 0.0,
        "staleness/max": float(oldest),
        "staleness/partial": float(num_partial),
    }


def sync_weights(
    roles: Roles, timer: PhaseTimer, version: WeightVersion, find_probe: Callable[[], StoredBatch]
) -> dict[str, float]:
    """Bring the trainer's weights to the engines; background sampling pauses and continues with
    them.

    find_probe   returns the batch that gave these weights; asked again after a recovery
    """
    background = roles.background
    if background is not None:
        with timer("pause"):
            background.pause_for_sync()
    with timer("sync"):
        metrics = dict(roles.recovery.repeat(lambda: roles.weights.sync(version, find_probe())))
    if background is not None:
        metrics |= background.resume(version)
    return metrics


@dataclass
class Rounds:
    """Samples that the rounds of dynamic sampling have drawn and kept so far."""

    kept: list[StoredSample] = field(default_factory=list)
    kept_scores: Scores = field(default_factory=lambda: Scores([]))
    num_rounds: int = 0
    num_sampled: int = 0
    rewards: list[float] = field(default_factory=list)

    def add(self, drawn: Rollout, kept: Sequence[int]) -> None:
        """Count a round and keep its samples at the indices `kept`."""
        self.num_rounds += 1
        self.num_sampled += len(drawn.samples)
        self.rewards += drawn.scores.outcomes()
        self.kept += [drawn.samples[i] for i in kept]
        self.kept_scores = join_scores([self.kept_scores, drawn.scores.select(kept)])

    def metrics(self) -> dict[str, float]:
        return {
            "sampling/rounds": float(self.num_rounds),
            "sampling/samples": float(self.num_sampled),
            "sampling/kept_share": len(self.kept) / self.num_sampled,
            "sampling/reward_mean": sum(self.rewards) / max(len(self.rewards), 1),
        }


def sample_now(options: SamplingOptions, roles: Roles, timer: PhaseTimer, seed: int) -> Rollout:
    """Sample from the engines' present weights; with dynamic sampling in as many rounds as it
    takes.

    DAPO, arXiv:2503.14476, section 3.2: groups whose rewards are all equal have no advantage, so
    further prompts are sampled until rollout.prompts_per_step groups differ in reward or
    rollout.max_rounds are over. If no group differs, the last round is returned as it is.
    """
    rollout = options.rollout
    failures = RewardFailures()
    where = f"step {timer.step}"
    if not rollout.dynamic_sampling:
        drawn = _sample_round(rollout.prompts_per_step, options, roles, timer, seed)
        failures.note(drawn.scores)
        failures.check(options.reward, where)
        return replace(drawn, metrics=failures.metrics())
    rounds = Rounds()
    missing = rollout.prompts_per_step
    group_size = rollout.samples_per_prompt
    while True:
        num_prompts = math.ceil(missing * rollout.oversampling)
        round_seed = seed + rounds.num_rounds * ROUND_SEEDS
        drawn = _sample_round(num_prompts, options, roles, timer, round_seed)
        failures.note(drawn.scores)
        failures.check(options.reward, where)
        kept = options.groups_with_signal(drawn.scores)[: missing * group_size]
        rounds.add(drawn, kept)
        missing = rollout.prompts_per_step - len(rounds.kept) // group_size
        if not missing or rounds.num_rounds == rollout.max_rounds:
            break
    if missing:
        _log.warning(
            "%d groups with differing rewards are missing after %d rounds",
            missing,
            rounds.num_rounds,
        )
    if rounds.kept:
        drawn = Rollout(rounds.kept, rounds.kept_scores)
    return replace(drawn, metrics=rounds.metrics() | failures.metrics())


def _sample_round(
    num_prompts: int, options: SamplingOptions, roles: Roles, timer: PhaseTimer, seed: int
) -> Rollout:
    """Sample and score responses to the next prompts."""
    with timer("rollout"):
        prompts = roles.prompts.take(num_prompts)
    drawn = _sample_prompts(prompts, options, roles, timer, seed)
    roles.prompts.note_scores(prompts, drawn.scores)
    return drawn


def _sample_prompts(
    prompts: Sequence[Prompt],
    options: SamplingOptions,
    roles: Roles,
    timer: PhaseTimer,
    seed: int,
) -> Rollout:
    """Sample and score responses to these prompts."""
    group_size = options.rollout.samples_per_prompt
    with timer("rollout"):
        samples = roles.generator.generate(prompts, group_size, greedy=False, seed=seed)
    with timer("reward"):
        generator, reward = roles.generator, roles.reward
        drawn = score(generator, reward, prompts, samples, greedy=False, seed=seed)
    if not options.with_greedy:
        return drawn
    greedy = _greedy_scores(prompts, roles, timer, seed)
    return replace(drawn, scores=drawn.scores.with_baselines(greedy))


def _greedy_scores(prompts: Sequence[Prompt], roles: Roles, timer: PhaseTimer, seed: int) -> Scores:
    """Return the score of a greedy response to each prompt."""
    with timer("rollout"):
        greedy = roles.generator.generate(prompts, 1, greedy=True, seed=seed)
    with timer("reward"):
        generator, reward = roles.generator, roles.reward
        return score(generator, reward, prompts, greedy, greedy=True, seed=seed).scores


def groups_with_signal(scores: Scores, group_size: int, role_part: str = "") -> list[int]:
    """Return the indices of all samples in groups that differ; `group_size` neighbors are a group.

    role_part   as in Scores.differ
    """
    indices: list[int] = []
    for start in range(0, len(scores.rewards_N), group_size):
        group = range(start, start + group_size)
        if scores.differ(group, role_part):
            indices += group
    return indices
