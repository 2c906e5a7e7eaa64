"""A cache of bounded bytes that forgets what was used longest ago."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class PatchCache(Generic[Value]):
    """Values by key, of at most `max_bytes` bytes together."""

    def __init__(
        self, max_bytes: int, on_forget: Callable[[Value], None] = lambda value: None
    ) -> None:
        """`on_forget` gets each value that was kept and is kept no longer."""
        self._max_bytes = max_bytes
        self._on_forget = on_forget
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self.num_bytes = 0
        """Bytes of all values."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Value | None:
        """Return the value of a key, which counts as used; None if it is not kept."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Hashable, value: Value, num_bytes: int) -> None:
        """Keep a value, and forget others until all fit; one that never fits is not kept."""
        self._forget(key)
        if num_bytes > self._max_bytes:
            return
        self._entries[key] = (value, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._entries)))

    def _forget(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry[1]
            self._on_forget(entry[0])
