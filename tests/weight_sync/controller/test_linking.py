"""Calls to trainer ranks are joined; test_sync.py links engines by them."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from mcore_rl.weight_sync.controller.linker import JoinedCalls

Call = Callable[[Sequence[int]], list[list[int]]]
DEADLINE_S = 30.0


def test_calls_that_come_while_one_is_under_way_are_joined() -> None:
    batches: list[list[int]] = []

    async def ask_all() -> list[list[str] | BaseException]:
        has_begun = asyncio.Event()
        may_end = asyncio.Event()

        async def call(items: Sequence[int]) -> list[list[str]]:
            batches.append(list(items))
            await asyncio.sleep(0)  # those that were asked at once are waiting after it
            if 3 in items:
                has_begun.set()
                await may_end.wait()
            if 5 in items:
                raise RuntimeError("no five")
            return [[f"rank {rank}: {item}" for item in items] for rank in range(2)]

        joined = JoinedCalls(call, asyncio.Lock())
        async with asyncio.timeout(DEADLINE_S):
            asking = [asyncio.ensure_future(joined.ask(item)) for item in (1, 2, 3)]
            await has_begun.wait()
            asking.append(asyncio.ensure_future(joined.ask(5)))
            await asyncio.sleep(0)
            may_end.set()
            return await asyncio.gather(*asking, return_exceptions=True)

    *answers, failed = asyncio.run(ask_all())
    assert answers == [[f"rank {rank}: {item}" for rank in range(2)] for item in (1, 2, 3)]
    assert str(failed) == "no five"
    assert batches == [[1], [2, 3], [5]] or batches == [[1, 2, 3], [5]]


@pytest.mark.parametrize("error", [KeyError("no such rank"), ValueError("no"), OSError("gone")])
def test_any_error_of_a_call_is_raised_for_all_that_it_joined(error: Exception) -> None:
    batches: list[list[int]] = []

    def call(items: Sequence[int]) -> list[list[int]]:
        batches.append(list(items))
        if 1 not in items:
            raise error
        return [list(items)]

    answers = asyncio.run(_ask_joined(call, 4))
    assert answers == [[1], error, error, error]
    assert batches == [[1], [2, 3, 4]]


def test_too_few_answers_are_an_error_for_all_that_a_call_joined() -> None:
    def call(items: Sequence[int]) -> list[list[int]]:
        return [list(items), list(items)[:2]]

    first, *others = asyncio.run(_ask_joined(call, 4))
    assert first == [1, 1]
    assert [type(other) for other in others] == [IndexError] * 3


def test_a_call_whose_asker_is_cancelled_keeps_no_other_waiting() -> None:
    answers = asyncio.run(_ask_joined(_answer, 4, canceled=2))
    assert answers[0] == [1] and isinstance(answers[1], asyncio.CancelledError)
    assert [str(answer) for answer in answers[2:]] == [
        "the joined call was cut off: CancelledError"
    ] * 2


def test_an_asker_that_left_before_the_answer_came_keeps_no_other_waiting() -> None:
    answers = asyncio.run(_ask_joined(_answer, 4, canceled=3))
    assert [answers[i] for i in (0, 1, 3)] == [[1], [2], [4]]
    assert isinstance(answers[2], asyncio.CancelledError)


def _answer(items: Sequence[int]) -> list[list[int]]:
    return [list(items)]


async def _ask_joined(
    answer: Call, num_items: int, canceled: int | None = None
) -> list[list[int] | BaseException]:
    """Return the answers to items 1 to `num_items`: 1 has a call of its own, the others one.

    canceled   item whose asker is canceled while the joined call is under way
    """
    are_asked = asyncio.Event()
    has_begun = asyncio.Event()
    may_end = asyncio.Event()

    async def call(items: Sequence[int]) -> list[list[int]]:
        if 1 in items:
            await are_asked.wait()
        else:
            has_begun.set()
            await may_end.wait()
        return answer(items)

    joined = JoinedCalls(call, asyncio.Lock())
    asking = []
    async with asyncio.timeout(DEADLINE_S):
        for item in range(1, num_items + 1):
            asking.append(asyncio.ensure_future(joined.ask(item)))
            await asyncio.sleep(0)
        are_asked.set()
        await has_begun.wait()
        if canceled is not None:
            asking[canceled - 1].cancel()
            await asyncio.sleep(0)
        may_end.set()
        return await asyncio.gather(*asking, return_exceptions=True)
