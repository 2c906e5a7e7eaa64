"""Blocking work beside an event loop: results, errors, and waiting that is given up."""

import asyncio
import threading

import pytest

from mcore_rl.rewards.in_thread import in_thread


def test_the_loop_goes_on_and_gets_the_result_or_the_error() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        assert go_on.wait(20)
        return 7

    async def both() -> int:
        waiting = asyncio.ensure_future(in_thread(work))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        go_on.set()
        return await waiting

    assert asyncio.run(both()) == 7
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(lambda: 1 // 0))


def test_who_gives_up_waiting_does_not_wait_for_the_thread() -> None:
    go_on = threading.Event()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(in_thread(lambda: go_on.wait(20)), 0.05)

    asyncio.run(give_up())
    go_on.set()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("own"), GeneratorExit()])
def test_an_exit_in_the_thread_is_an_error_of_the_call(error: BaseException) -> None:
    def work() -> None:
        raise error

    async def wait() -> None:
        await asyncio.wait_for(in_thread(work), 20)

    with pytest.raises(RuntimeError, match=type(error).__name__):
        asyncio.run(wait())
