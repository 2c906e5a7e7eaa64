"""The engines as the loop sees them: prompts in, samples out."""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from mcore_rl.config import RolloutConfig
from mcore_rl.roles import Watched
from mcore_rl.rollout.client import RolloutClient, RolloutError
from mcore_rl.rollout.request import Sampling
from mcore_rl.types import Prompt, Sample

_log = logging.getLogger(__name__)


class EngineGenerator:
    """Generates on the engines, at the recipe's sampling or greedily."""

    def __init__(
        self,
        client: RolloutClient,
        config: RolloutConfig,
        watched: Watched[list[Sample]],
        revive: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """`revive`: waits for an engine when none serves; False if none will."""
        self._client, self._config, self._watched, self._revive = client, config, watched, revive
        self._idle = time.monotonic(), client.idle_s
        """When the engines' idle time was last looked at, and what it was."""

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, *, greedy: bool, seed: int
    ) -> list[Sample]:
        sampling = make_sampling(self._config, greedy=greedy, seed=seed)
        return self._watched(self._generate(prompts, num_samples, sampling))

    def idle_share(self) -> float:
        now_s, idle_s = time.monotonic(), self._client.idle_s
        (before_s, idle_before_s), self._idle = self._idle, (now_s, idle_s)
        return (idle_s - idle_before_s) / (now_s - before_s)

    async def _generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[Sample]:
        while True:
            try:
                return await self._client.generate(prompts, num_samples, sampling)
            except RolloutError as error:
                if self._revive is None or not await self._revive():
                    raise
                _log.warning("%s; all %d prompts are sampled again", error, len(prompts))


def make_sampling(config: RolloutConfig, *, greedy: bool, seed: int) -> Sampling:
    """As the recipe samples, or greedily."""
    return Sampling(
        max_response_len=config.max_response_len,
        temperature=0.0 if greedy else config.temperature,
        top_p=1.0 if greedy else config.top_p,
        top_k=-1 if greedy else config.top_k,
        seed=seed,
        routed_experts=not greedy,
    )
