"""Every episode of a pool ends or raises an error that says why, and nothing is left of a pool."""

import asyncio
import logging
import os
import random
import re
import signal

import pytest

from mcore_rl.agents.environments.environment import (
    EnvironmentFailedError,
    EnvironmentLostError,
    EnvironmentTimeoutError,
    EpisodeError,
)
from mcore_rl.agents.environments.keeper import list_descendants
from mcore_rl.agents.environments.pool import describe_task, make_task_fields
from tests.agents.environments import episodes
from tests.agents.environments.pools import COROUTINES, COUNTDOWN, TASK, answer, in_pool, play


def test_an_episode_runs_to_its_end_in_a_thread_of_its_own(tmp_path):
    async def use(pool):
        episode = await pool.open(TASK)
        assert episode.start.messages == [{"role": "user", "content": "task 7"}]
        steps = [await episode.step(answer()) for _ in range(2)]
        await episode.close()
        return steps

    first, second = in_pool(
        use, kind=COUNTDOWN, options={"turns": 2}, log_folder=str(tmp_path / "logs")
    )
    assert not first.done and second.done
    assert first.reward == 1.0 and first.metrics["same_thread"] == 1.0
    assert first.messages == [{"role": "user", "content": "1 left"}]
    assert first.metrics["pid"] != os.getpid()
    assert (tmp_path / "logs/worker_0.log").read_text() == "closed\n"


def test_coroutines_run_at_once_and_keep_what_they_say():
    async def use(pool):
        steps = await asyncio.gather(*(play(pool, ["MEET"]) for _ in range(10)))
        return [step for (step,) in steps]

    for step in in_pool(use, kind=COROUTINES):
        assert step.done and step.end_reason == "parse_error"


def test_an_error_of_the_environment_has_its_traceback_and_costs_only_its_episode():
    async def use(pool):
        other = await pool.open(TASK)
        with pytest.raises(EnvironmentFailedError) as caught:
            await play(pool, ["RAISE"])
        await other.step(answer())
        with pytest.raises(EnvironmentFailedError, match=r"reset to task 7 .*LookupError: no such"):
            await pool.open({**vars(TASK), "extra_info": {"raises": True}})
        with pytest.raises(EnvironmentFailedError, match="reward is nan: rewards and metrics are"):
            await play(pool, ["NAN"])
        return str(caught.value)

    text = in_pool(use, kind=COUNTDOWN)
    assert re.match(
        rf"environment {re.escape(COUNTDOWN)}, worker 0 \(pid \d+\): step of task 7 of levels, "
        r"sample 2 failed: RuntimeError: the dragon woke\nTraceback",
        text,
    )


def test_a_task_that_is_not_json_is_the_callers_mistake():
    async def use(pool):
        with pytest.raises(ValueError, match="a object is not JSON"):
            await pool.open({**vars(TASK), "ground_truth": object()})
        return await play(pool)

    assert in_pool(use, kind=COUNTDOWN, episodes_per_worker=1)[-1].done


def test_a_slow_episode_costs_itself_and_its_worker_is_replaced_when_the_others_are_over(caplog):
    async def use(pool):
        other = await pool.open(TASK)
        pid = (await other.step(answer())).metrics["pid"]
        with pytest.raises(EnvironmentTimeoutError, match=r"more than 0.5 s \(step_timeout_s\)"):
            await play(pool, ["SLEEP 60"])
        assert (await other.step(answer())).metrics["pid"] == pid
        await other.close()
        assert (await play(pool))[0].metrics["pid"] != pid

    with caplog.at_level(logging.WARNING):
        in_pool(use, kind=COUNTDOWN, step_timeout_s=0.5)
    assert "worker 0 is replaced: an episode hangs in it" in caplog.text


def test_a_slow_coroutine_is_canceled_and_closed_and_its_worker_goes_on(tmp_path):
    log = tmp_path / "closed"

    async def use(pool):
        with pytest.raises(EnvironmentTimeoutError):
            await play(pool, ["60"])
        await play(pool, ["0"])
        return pool._workers[0].name

    options = {"closed_log": str(log)}
    assert in_pool(use, kind=COROUTINES, options=options, step_timeout_s=0.5) == "worker 0"
    assert log.read_text() == "closed\nclosed\n"


def test_a_canceled_step_leaves_its_place(tmp_path):
    log = tmp_path / "closed"

    async def use(pool):
        episode = await pool.open(TASK)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await episode.step(answer("60"))
        await episode.close()
        await play(pool, ["0"])

    options = {"closed_log": str(log)}
    in_pool(use, kind=COROUTINES, options=options, episodes_per_worker=1, place_timeout_s=5)
    assert log.read_text() == "closed\nclosed\n"


def test_a_worker_that_dies_is_named_with_its_status_and_replaced():
    async def use(pool):
        bystander = await pool.open(TASK)
        with pytest.raises(
            EnvironmentLostError, match=r"worker 0 .* step of task 7.*died with status 3"
        ):
            await play(pool, ["PRINT alas", "DIE"])
        with pytest.raises(EnvironmentLostError, match=r"(?s)the end of its log .*:\nalas"):
            await bystander.step(answer())
        await bystander.close()
        return await play(pool)

    assert in_pool(use, kind=COUNTDOWN)[-1].done


def test_episodes_wait_for_a_place_and_not_for_ever():
    async def use(pool):
        first = await pool.open(TASK)
        waiting = asyncio.ensure_future(play(pool))
        with pytest.raises(EpisodeError, match=r"waited for a place in 1 workers .* 4 s"):
            await play(pool)
        with pytest.raises(EpisodeError, match="waited for a place"):
            await waiting
        await first.close()
        return await play(pool)

    assert in_pool(use, kind=COUNTDOWN, episodes_per_worker=1, place_timeout_s=4)[-1].done


def test_workers_start_when_they_are_needed():
    async def use(pool):
        opened = [await pool.open(TASK)]
        assert len(pool._workers) == 1
        opened += await asyncio.gather(*(pool.open(TASK) for _ in range(3)))
        assert len(pool._workers) == 2
        for episode in opened:
            await episode.close()

    in_pool(use, kind=COUNTDOWN, workers=2, episodes_per_worker=4)


def test_a_class_that_cannot_be_loaded_is_told_to_the_first_episode():
    async def use(pool):
        with pytest.raises(
            EnvironmentFailedError, match=r"loading its class .* ValueError: .*nope"
        ):
            await pool.open(TASK)

    in_pool(use, kind=f"{episodes.HERE}:nope")


def test_every_episode_is_accounted_for_while_workers_are_killed_at_random():
    """Between two kills at least one episode is done, however slow the machine is."""
    generator = random.Random(1)

    async def one(pool, one_is_done):
        try:
            steps = await play(pool, ["SLEEP 0.02"] * 10)
            one_is_done.set()
            return "done" if steps[-1].done else "cut short"
        except EnvironmentLostError:
            return "lost"

    async def kill(pool, one_is_done, killed):
        while True:
            await one_is_done.wait()
            alive = [worker for worker in pool._workers if not worker.lost and worker.episodes]
            if alive:
                keeper = generator.choice(alive)._process.pid
                below = list_descendants(keeper)
                one_is_done.clear()
                os.kill(generator.choice([keeper, *below]), signal.SIGKILL)
                killed.append(keeper)
            await asyncio.sleep(0.25)

    async def use(pool):
        killed: list[int] = []
        one_is_done = asyncio.Event()
        killer = asyncio.ensure_future(kill(pool, one_is_done, killed))
        outcomes = await asyncio.gather(*(one(pool, one_is_done) for _ in range(50)))
        killer.cancel()
        async with asyncio.timeout(60):  # until the last death is known
            while any(worker._process.pid in killed for worker in pool._workers):
                await asyncio.sleep(0.01)
        lost = outcomes.count("lost")
        again = await asyncio.gather(*(one(pool, one_is_done) for _ in range(lost)))
        assert pool._workers and all(not worker.episodes for worker in pool._workers)
        return killed, outcomes, again

    killed, outcomes, again = in_pool(
        use, kind=COUNTDOWN, options={"turns": 10}, workers=3, episodes_per_worker=8
    )
    assert len(outcomes) == 50 and set(outcomes) <= {"done", "lost"}
    assert killed and "lost" in outcomes and "done" in outcomes
    assert set(again) == {"done"}


def test_tasks_are_mappings_or_values_and_have_a_name():
    assert make_task_fields(TASK)["index"] == 7 and make_task_fields({"index": 1}) == {"index": 1}
    assert describe_task(make_task_fields(TASK)) == "task 7 of levels, sample 2"
