"""Scores samples; groups that are lost with their collector before that are sampled again."""

import logging
from collections.abc import Sequence

from mcore_rl.loops.outcomes import Rollout
from mcore_rl.loops.roles import Generator, Reward
from mcore_rl.process.lost_samples import SamplesLostError, find_kept
from mcore_rl.types import Prompt, StoredSample

_log = logging.getLogger(__name__)


def sample_and_score(
    generator: Generator,
    reward: Reward,
    prompts: Sequence[Prompt],
    num_samples: int,
    *,
    greedy: bool,
    seed: int,
    for_eval: bool = False,
) -> Rollout:
    """Return `num_samples` samples of each prompt, in the order of `prompts`, with their scores."""
    samples = generator.generate(prompts, num_samples, greedy=greedy, seed=seed, for_eval=for_eval)
    return score(generator, reward, prompts, samples, greedy=greedy, seed=seed, for_eval=for_eval)


def score(
    generator: Generator,
    reward: Reward,
    prompts: Sequence[Prompt],
    samples: Sequence[StoredSample],
    *,
    greedy: bool,
    seed: int,
    for_eval: bool = False,
) -> Rollout:
    """Return the samples of `prompts` with their scores; samples that are lost are drawn again.

    They are drawn with the seed of the first time: engines that sample by seeds return the same.
    """
    samples = list(samples)
    num_samples = len(samples) // len(prompts)
    while True:
        try:
            return Rollout(samples, reward(samples))
        except SamplesLostError as lost:
            kept = set(find_kept(samples[::num_samples], lost))
            missing = [i for i in range(len(prompts)) if i not in kept]
            _log.warning("%s; %d prompts are sampled again", lost, len(missing))
            generator.note_lost(len(missing) * num_samples)
        again = [prompts[i] for i in missing]
        drawn = generator.generate(again, num_samples, greedy=greedy, seed=seed, for_eval=for_eval)
        for place, i in enumerate(missing):
            part = drawn[place * num_samples : (place + 1) * num_samples]
            samples[i * num_samples : (i + 1) * num_samples] = part
