"""A background sampler on a fake engine, with all that it calls."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from mcore_rl.config import RewardConfig, RolloutConfig
from mcore_rl.data.source import ShuffledStream
from mcore_rl.logs.episode_log import EpisodeLog
from mcore_rl.loops.sampling import SamplingOptions
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.transport import HttpOptions
from mcore_rl.run.roles.background import BackgroundSampler
from mcore_rl.run.roles.groups import GroupBuffer
from mcore_rl.types import Prompt, StoredSample, WeightVersion
from mcore_rl.types.scores import Scores
from tests.support.fake_sglang import FakeSGLang
from tests.support.storing_client import StoringClient

PROMPTS = [Prompt(i, (1, 2 + i), (), "unit", "") for i in range(40)]


async def score_by_index(samples: Sequence[StoredSample]) -> Scores:
    """Even prompts have rewards that differ, odd ones do not."""
    return Scores([float(s.prompt.index % 2 == 0 and s.sample_index == 0) for s in samples])


class Sampler:
    """A background sampler, which `make` makes, with all that it calls."""

    def __init__(
        self,
        make: Callable[..., BackgroundSampler],
        loop: EventLoop,
        *,
        with_greedy: bool = False,
        score: Callable[[Sequence[StoredSample]], Awaitable[Scores]] = score_by_index,
        rewards: RewardConfig | None = None,
        episodes: EpisodeLog | None = None,
        **options: Any,
    ) -> None:
        sizes = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_len": 3}
        rollout = RolloutConfig(**{**sizes, "retries": 0, **options})
        drawing = SamplingOptions(rollout, rewards or RewardConfig(), with_greedy=with_greedy)
        self.engine = FakeSGLang(loop)
        http = HttpOptions.make(rollout, [9], str)
        self.prompts = ShuffledStream(PROMPTS, seed=0, shuffle=False)
        self.num_revived = 0
        self.can_revive = True
        self.background = make(
            drawing,
            0,
            WeightVersion(0),
            self.prompts,
            StoringClient(RolloutClient([self.engine.address], rollout, http.open)),
            score,
            loop.run,
            loop.start,
            self.revive,
            episodes,
        )

    async def revive(self) -> bool:
        self.num_revived += 1
        self.engine.answer = lambda body: None
        await asyncio.sleep(0)
        return self.can_revive

    def take(self, version: int) -> list[int]:
        """The prompts of the step, each once."""
        samples, scores, _ = self.background.take(WeightVersion(version))
        assert len(scores.rewards_N) == len(samples)
        return [sample.prompt.index for sample in samples[::2]]

    def move_to(self, version: int) -> None:
        self.background.pause_for_sync()
        self.engine.version = version
        self.background.resume(WeightVersion(version))

    def wait_until(self, holds: Callable[[GroupBuffer], bool]) -> None:
        """Wait until something holds for the groups that began and were not taken."""
        until_s = time.monotonic() + 30
        while not holds(self.background._buffer):
            assert time.monotonic() < until_s, "the sampler stands still"
            time.sleep(0.01)

    def wait_until_full(self) -> None:
        """Wait until no further group may begin, and all that began are finished."""
        self.wait_until(lambda groups: groups.room() <= 0 and not groups.num_unfinished)
