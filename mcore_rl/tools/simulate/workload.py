"""Makes up prompts, lengths of responses and rewards, all drawn from the run's seed."""

import math
import random
from collections.abc import Sequence
from typing import overload

from mcore_rl.config import DataConfig, SimulateConfig
from mcore_rl.types import Prompt, StoredSample
from mcore_rl.types.scores import Scores

NUM_PROMPTS = 10**9
"""So that no epoch ends."""
DEFAULT_PROMPT_LEN = 256
DEFAULT_SHARE = 0.4
"""Mean length of responses as a share of the longest, where the recipe gives none."""


def prompt_len_of(simulate: SimulateConfig, data: DataConfig) -> int:
    """Return the tokens of each prompt."""
    return simulate.prompt_len or min(DEFAULT_PROMPT_LEN, data.max_prompt_len)


class SimulatedPrompts(Sequence[Prompt]):
    """Prompts of one length, made when they are asked for."""

    def __init__(self, prompt_len: int, num_prompts: int = 0) -> None:
        """0 prompts: so many that none comes a second time."""
        self._token_ids = (1,) * prompt_len
        self._num_prompts = num_prompts or NUM_PROMPTS

    def __len__(self) -> int:
        return self._num_prompts

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return Prompt(index, self._token_ids, (), "simulated", None)


class Workload:
    """Response lengths are log-normal, cut at the longest; samples are right or wrong.

    Each prompt has a probability of right answers of its own, uniform in [0, 1].
    """

    def __init__(self, simulate: SimulateConfig, max_response_len: int, seed: int) -> None:
        self._seed = seed
        self._longest = max_response_len
        mean = simulate.response_len or DEFAULT_SHARE * self._longest
        spread = simulate.response_spread
        self._center = math.log(mean) - spread**2 / 2
        self._between = spread * math.sqrt(simulate.prompt_share)
        self._within = spread * math.sqrt(1 - simulate.prompt_share)

    def response_len(self, prompt: int, sample: int, seed: int = 0) -> int:
        """Return the tokens that a response has if nothing but its length ends it.

        Another `seed` of the request makes another response to the same prompt.
        """
        center = self._center
        if self._between:
            center += random.Random(hash((self._seed, prompt, -1))).gauss(0, self._between)
        draw = random.Random(hash((self._seed, prompt, sample, seed)))
        return max(1, round(draw.lognormvariate(center, self._within)))

    def finish(
        self, prompt: int, sample: int, seed: int = 0, longest: int | None = None
    ) -> tuple[int, str]:
        """Return the tokens of a response, and why it ends.

        longest   tokens that it is cut at; None: rollout.max_response_len
        """
        wanted = self.response_len(prompt, sample, seed)
        bound = self._longest if longest is None else longest
        return (wanted, "stop") if wanted <= bound else (bound, "length")

    def scores(self, samples: Sequence[StoredSample]) -> Scores:
        return Scores([self._reward(s.prompt.index, s.sample_index) for s in samples])

    def _reward(self, prompt: int, sample: int) -> float:
        probability = random.Random(hash((self._seed, prompt))).random()
        draw = random.Random(hash((self._seed, sample, prompt))).random()
        return float(draw < probability)
