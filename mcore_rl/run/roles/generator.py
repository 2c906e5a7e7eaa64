"""Generates samples of prompts on the engines, for the training loop and for evaluations."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from mcore_rl.config import EvalConfig, RolloutConfig
from mcore_rl.logs.episode_log import EpisodeLog
from mcore_rl.logs.progress import count_in_stage
from mcore_rl.loops.roles import NO_RECOVERY, Recovery, Watched
from mcore_rl.process.clock import now_s
from mcore_rl.rollout.drafts import measure_drafts
from mcore_rl.rollout.paces import measure_lag
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.sampling_client import SamplingClient
from mcore_rl.rollout.transport import RolloutError
from mcore_rl.types import Prompt, StoredSample

_log = logging.getLogger(__name__)


class EngineGenerator:
    """Implements roles.Generator on the engines of a run."""

    def __init__(
        self,
        client: SamplingClient,
        config: RolloutConfig,
        watched: Watched,
        revive: Callable[[], Awaitable[bool]] | None = None,
        episodes: EpisodeLog | None = None,
        evaluation: RolloutConfig | None = None,
        recovery: Recovery = NO_RECOVERY,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`revive`: if no engine serves, waits for one; returns False if none is starting again.

        episodes     logs which groups begin, and why their episodes end
        evaluation   sampling options for evaluations; None: the options for training
        recovery     replaces lost ranks, without which no engine can be started again
        prepare      brings weights to engines that gave them up; awaited before requests
        """
        self._recovery = recovery
        self._prepare = prepare
        self._episodes = episodes or EpisodeLog()
        self._client = client
        self._config = config
        self._evaluation = evaluation or config
        self._watched = watched
        self._revive = revive
        self._idle_before = now_s(), watched(client.idle_seconds())
        """The time of the last `_measure_idle` and the engines' idle seconds then."""
        self._num_lost = 0
        """Complete samples that were lost."""
        self._num_told = 0

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        *,
        greedy: bool,
        seed: int,
        for_eval: bool = False,
    ) -> list[StoredSample]:
        """See roles.Generator."""
        config = self._evaluation if for_eval else self._config
        sampling = make_sampling(config, greedy=greedy, seed=seed)
        count = count_drawn(self._client, len(prompts) * num_samples)
        recorded = self._episodes.record(prompts, num_samples, greedy=greedy)
        with recorded as samples, count_in_stage(count):
            samples += self._recovery.repeat(
                lambda: self._watched(self._generate(prompts, num_samples, sampling))
            )
        return samples

    def measure_engines(self) -> dict[str, float]:
        """See roles.Generator."""
        drafts = measure_drafts(self._client.take_drafts(), self._config.speculate_tokens)
        lag = measure_lag(self._client.take_paces())
        return {"idle/engines": self._measure_idle(), **lag, **drafts}

    def _measure_idle(self) -> float:
        """Return the share of the time since the last call in which an engine had no request."""
        idle_s = self._watched(self._client.idle_seconds())
        at_s = now_s()
        before_s, idle_before_s = self._idle_before
        self._idle_before = at_s, idle_s
        # The count of a restarted collector begins at 0.
        return max(idle_s - idle_before_s, 0.0) / (at_s - before_s)

    def note_lost(self, num_samples: int) -> None:
        """See roles.Generator."""
        self._num_lost += num_samples

    def take_num_lost(self) -> int:
        """See roles.Generator."""
        before = self._num_told
        self._num_told = self._num_lost + self._client.num_lost
        return self._num_told - before

    async def _generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling
    ) -> list[StoredSample]:
        if self._prepare is not None:
            await self._prepare()
        while True:
            try:
                return await self._client.generate(prompts, num_samples, sampling)
            except RolloutError as error:
                if self._revive is None or not await self._revive():
                    raise
                _log.warning("%s; all %d prompts are sampled again", error, len(prompts))


def count_drawn(client: SamplingClient, num_samples: int = 0) -> Callable[[], str]:
    """Return a function that tells what was drawn since now, of so many samples; 0: of any."""
    done_before, tokens_before = client.num_done, client.num_tokens

    def count() -> str:
        num_done = client.num_done - done_before
        done = f"{min(num_done, num_samples)} of {num_samples}" if num_samples else str(num_done)
        return f"{done} samples, {client.num_tokens - tokens_before:,} tokens of whole groups"

    return count


def rollout_of_evaluations(training: RolloutConfig, evaluation: EvalConfig) -> RolloutConfig:
    """Return the rollout options with those that the evaluation replaces."""
    return replace(
        training,
        temperature=evaluation.temperature or training.temperature,
        top_p=evaluation.top_p or training.top_p,
        max_response_len=evaluation.max_response_len or training.max_response_len,
    )


def make_sampling(config: RolloutConfig, *, greedy: bool, seed: int) -> Sampling:
    """Return the sampling options: the recipe's, or greedy ones without reports."""
    return Sampling(
        max_response_len=config.max_response_len,
        temperature=0.0 if greedy else config.temperature,
        top_p=1.0 if greedy else config.top_p,
        top_k=-1 if greedy else config.top_k,
        seed=seed,
        routed_experts=not greedy,
        indexer_topk=not greedy,
    )
