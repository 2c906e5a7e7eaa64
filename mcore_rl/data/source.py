"""An endless shuffled stream of a list's items, whose position is saved, and mixing of sources.

`Mixing` decides which of several sources gives the next item, so that shares are exact at every
moment. After any number n of items, source i with share w_i has given w_i * n of them, to within
1 - 1 / (2k - 2) for k sources: R. Tijdeman, The chairman assignment problem, Discrete Mathematics
32 (1980).
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class Mixing:
    """The sequence of sources, by weights. Its position is the number of items of each source."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Decimal weights such as 0.1 count as what they say, not as binary fractions."""
        exact = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * scale) for weight in exact]
        self._total = sum(self._weights)
        self.counts = [0] * len(weights)
        """Items that each source has given."""

    def next(self) -> int:
        """Return the source of the next item, and count the item."""
        chosen = self._choose()
        self.counts[chosen] += 1
        return chosen

    def _choose(self) -> int:
        """Return the source that would first be too far behind, among those that are behind.

        With n items given, source i is behind by w_i * (n + 1) - counts[i]. All numbers are
        multiplied by the sum of the weights and by `parts`, which makes them integers.
        """
        num_sources = len(self._weights)
        if num_sources == 1:
            return 0
        parts = 2 * num_sources - 2
        item = sum(self.counts) + 1
        best = -1
        best_slack, best_weight = 0, 1
        for i, (weight, count) in enumerate(zip(self._weights, self.counts, strict=True)):
            behind = parts * (weight * item - count * self._total)
            if behind < self._total:
                continue
            slack = (parts - 1) * self._total - behind
            if best < 0 or slack * best_weight < best_slack * weight:
                best = i
                best_slack, best_weight = slack, weight
        assert best >= 0, (self._weights, self.counts)
        return best


@dataclass(frozen=True)
class StreamPlace:
    """How far a stream has come.

    next    position of the first item that was never handed out
    again   positions before that, which are handed out once more, in order
    rows    items in an epoch of each source
    """

    next: int
    again: tuple[int, ...]
    rows: tuple[int, ...]


class ShuffledStream(Generic[T]):
    """Endless epochs of `items`, in an order drawn from (seed, epoch) or in the given order."""

    def __init__(self, items: Sequence[T], seed: int, shuffle: bool = True) -> None:
        if not items:
            raise ValueError("a stream of no items would never yield one")
        self._items = items
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0
        """Number of items handed out since the start."""
        self._open: set[int] = set()
        """Positions of items that were begun and not ended."""
        self._again: list[int] = []
        """Positions that were open when the loaded state was saved; handed out first."""
        self._lock = threading.Lock()

    def take(self, num_items: int) -> list[T]:
        """Begin and end the next items."""
        begun = [self.begin() for _ in range(num_items)]
        self.end(position for position, _ in begun)
        return [item for _, item in begun]

    def begin(self) -> tuple[int, T]:
        """Return the next item's position and the item. A stream that continues from a state saved
        before `end` hands it out again.
        """
        with self._lock:
            if self._again:
                position = self._again.pop(0)
            else:
                position = self._position
                self._position += 1
            self._open.add(position)
            return position, self._get_item(position)

    def end(self, positions: Iterable[int]) -> None:
        """Mark begun items as used; they are not handed out again after a restart."""
        with self._lock:
            self._open -= set(positions)

    def note_scores(self, prompts: Sequence[Any], scores: object) -> None:
        """Change nothing: rewards do not move this order."""

    def close(self) -> None:
        """Do nothing: all items are in memory."""

    def get_place(self) -> StreamPlace:
        """Return how far the stream has come."""
        with self._lock:
            return StreamPlace(self._position, tuple(self._again), (len(self._items),))

    def find_epoch(self, position: int) -> tuple[int, int]:
        """Return (source, epoch) of an item that was begun and not ended."""
        return 0, position // len(self._items)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the open items. Safe to call while another thread begins and ends
        items.
        """
        with self._lock:
            state = {"position": self._position, "num_items": len(self._items), "seed": self._seed}
            return {**state, "open": sorted([*self._open, *self._again])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was saved. Raises ValueError if it belongs to other data or
        another seed.
        """
        for name, here in (("num_items", len(self._items)), ("seed", self._seed)):
            if state.get(name) != here:
                raise ValueError(
                    f"the checkpoint's data position has {name}={state.get(name)}, this run {here}:"
                    " resume with the same data files and run.seed, or start in a new run.dir"
                )
        self._position = state["position"]
        self._again = list(state.get("open", ()))

    def _get_item(self, position: int) -> T:
        epoch, place = divmod(position, len(self._items))
        return self._items[self._order(epoch)[place]]

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._items))
        if getattr(self, "_cached_epoch", None) != epoch:
            generator = torch.Generator().manual_seed(self._seed * 100_003 + epoch)
            self._cached_order = torch.randperm(len(self._items), generator=generator).tolist()
            self._cached_epoch = epoch
        return self._cached_order
