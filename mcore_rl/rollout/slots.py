"""Bounds how many requests are under way at once; the bound may change while they are."""

import asyncio


class Slots:
    """A semaphore whose number of places can change."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = asyncio.Semaphore(num_slots)
        self._num_owed = 0
        """Slots that go away as soon as their requests have ended."""

    async def acquire(self) -> None:
        """Wait for a slot and take it."""
        await self._free.acquire()

    def release(self) -> None:
        """Give a slot back."""
        if self._num_owed:
            self._num_owed -= 1
        else:
            self._free.release()

    def resize(self, num_slots: int) -> None:
        """Have so many slots from now on; those that are taken and too many go with their ends."""
        for _ in range(num_slots - self._num_slots):
            self.release()
        self._num_owed += max(self._num_slots - num_slots, 0)
        self._num_slots = num_slots
