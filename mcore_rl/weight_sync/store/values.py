"""The keys and values of one store, and whom to call once keys are there; safe for threads."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence


class _Waiter:
    def __init__(self, missing: set[str], on_present: Callable[[], None]) -> None:
        self.missing = missing
        self.on_present = on_present


class Values:
    """A dictionary in memory.

    `set`, `get`, `add`, `compare_set` and the like do what torch's stores do.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._waiters: dict[str, list[_Waiter]] = defaultdict(list)

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            done = self._put(key, value)
        _call_all(done)

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """Set many keys."""
        done = []
        with self._lock:
            for key, value in values.items():
                done += self._put(key, value)
        _call_all(done)

    def get(self, key: str) -> bytes | None:
        """Return the value, or None if the key is not set."""
        with self._lock:
            return self._values.get(key)

    def get_all(self, keys: Iterable[str]) -> list[bytes]:
        """Return the values of `keys`, in order; KeyError if one is not set."""
        with self._lock:
            return [self._values[key] for key in keys]

    def take_all(self, keys: Iterable[str]) -> list[bytes]:
        """Remove `keys` and return their values, in order; KeyError if one is not set."""
        with self._lock:
            return [self._values.pop(key) for key in keys]

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return those of `keys` that are not set."""
        with self._lock:
            return [key for key in keys if key not in self._values]

    def check(self, keys: Iterable[str]) -> bool:
        """Return whether all of `keys` are set."""
        return not self.missing(keys)

    def add(self, key: str, amount: int) -> int:
        """Add to the number under `key`, at first 0; return the sum."""
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            done = self._put(key, str(total).encode())
        _call_all(done)
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set the value to `desired` if it is `expected`, or if neither exists; return the value.

        Like torch, return `expected` for a key that is not set, unless that is empty.
        """
        with self._lock:
            present = self._values.get(key)
            if present is None and expected:
                return expected
            if present is not None and present != expected:
                return present
            done = self._put(key, desired)
        _call_all(done)
        return desired

    def delete(self, key: str) -> bool:
        """Return whether the key was set."""
        with self._lock:
            return self._values.pop(key, None) is not None

    def count(self) -> int:
        with self._lock:
            return len(self._values)

    def when_present(self, keys: Sequence[str], on_present: Callable[[], None]) -> _Waiter | None:
        """Call `on_present` once all of `keys` are set: at once, or in the thread that sets them.

        Returns what `forget` takes, or None if it was called already.
        """
        with self._lock:
            missing = {key for key in keys if key not in self._values}
            if missing:
                waiter = _Waiter(missing, on_present)
                for key in missing:
                    self._waiters[key].append(waiter)
                return waiter
        on_present()
        return None

    def forget(self, waiter: _Waiter) -> None:
        """Drop a call that is no longer waited for."""
        with self._lock:
            for key in waiter.missing:
                waiters = self._waiters.get(key, [])
                if waiter in waiters:
                    waiters.remove(waiter)
                if not waiters:
                    self._waiters.pop(key, None)

    def _put(self, key: str, value: bytes) -> list[_Waiter]:
        """Set the value; return the waiters that miss nothing more."""
        self._values[key] = value
        waiters = self._waiters.pop(key, [])
        for waiter in waiters:
            waiter.missing.discard(key)
        return [waiter for waiter in waiters if not waiter.missing]


def _call_all(waiters: Sequence[_Waiter]) -> None:
    for waiter in waiters:
        waiter.on_present()
