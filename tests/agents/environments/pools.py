"""Plays episodes of the tests' environments in a pool, and sees that nothing is left of it."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from mcore_rl.agents.environments.keeper import list_descendants
from mcore_rl.agents.environments.pool import EnvironmentPool
from mcore_rl.agents.environments.worker_process import EnvironmentOptions
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
        others = set(list_descendants(os.getpid()))
        async with EnvironmentPool(EnvironmentOptions(**{"workers": 1, **options})) as pool:
            result = await use(pool)
            pids = sorted(set(list_descendants(os.getpid())) - others)
        assert not all_gone(pids)
        return result

    return asyncio.run(run())


Use = Callable[[EnvironmentPool], Coroutine[Any, Any, Any]]


@contextmanager
def kept_pool(options: EnvironmentOptions) -> Iterator[Callable[[Use], Any]]:
    """Yield a function that returns what `use(pool)` returns, with one pool for all calls.

    For workers whose packages take seconds to import.
    """
    with asyncio.Runner() as runner:
        pool = EnvironmentPool(options)
        runner.run(pool.__aenter__())
        try:
            yield lambda use: runner.run(use(pool))
        finally:
            runner.run(pool.__aexit__(None, None, None))


async def play(pool, words=("go", "go", "go"), task=TASK):
    episode = await pool.open(task)
    try:
        return [await episode.step(answer(word)) for word in words]
    finally:
        await episode.close()
