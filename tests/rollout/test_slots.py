"""How many requests are under way at once, while the bound changes."""

import asyncio

from mcore_rl.rollout.slots import Slots


def test_a_bound_that_changes_lets_more_begin_or_waits_for_ends() -> None:
    async def run() -> None:
        slots = Slots(2)
        begun: list[int] = []

        async def begin(number: int) -> None:
            await slots.acquire()
            begun.append(number)

        async with asyncio.TaskGroup() as tasks:
            for number in range(6):
                tasks.create_task(begin(number))
            await settle()
            assert begun == [0, 1]
            slots.resize(4)
            await settle()
            assert begun == [0, 1, 2, 3]
            slots.resize(3)
            slots.release()
            await settle()
            assert begun == [0, 1, 2, 3], "three are under way"
            slots.release()
            await settle()
            assert begun == [0, 1, 2, 3, 4]
            slots.resize(4)
            await settle()
            assert begun == [0, 1, 2, 3, 4, 5]

    asyncio.run(asyncio.wait_for(run(), 20))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
