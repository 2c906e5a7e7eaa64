"""Plays episodes of the tests' environments in a pool, and sees that nothing is left of it."""

import asyncio
import os

from mcore_rl.agents.environments.keeper import descendants
from mcore_rl.agents.environments.options import EnvironmentOptions
from mcore_rl.agents.environments.pool import EnvironmentPool
from mcore_rl.agents.messages import EpisodeTask
from tests.agents.environments import episodes
from tests.agents.environments.episodes import all_gone

COUNTDOWN = f"{episodes.HERE}:Countdown"
COROUTINES = f"{episodes.HERE}:Coroutines"
TASK = EpisodeTask((), "levels", None, index=7, sample_index=2)


def answer(text="go"):
    return {"role": "assistant", "content": text}


def in_pool(use, **options):
    async def run():
        others = set(descendants(os.getpid()))
        async with EnvironmentPool(EnvironmentOptions(**{"workers": 1, **options})) as pool:
            result = await use(pool)
            pids = sorted(set(descendants(os.getpid())) - others)
        assert not all_gone(pids)
        return result

    return asyncio.run(run())


async def play(pool, words=("go", "go", "go"), task=TASK):
    episode = await pool.open(task)
    try:
        return [await episode.step(answer(word)) for word in words]
    finally:
        await episode.close()
