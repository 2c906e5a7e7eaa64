"""A list in, an endless shuffled stream of its items out, whose position can be saved and restored."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class ShuffledStream(Generic[T]):
    """Epoch after epoch of `items`, each in an order drawn from (seed, epoch), or in the given order."""

    def __init__(self, items: Sequence[T], seed: int, shuffle: bool = True) -> None:
        if not items:
            raise ValueError("a stream of no items would never yield one")
        self._items, self._seed, self._shuffle = items, seed, shuffle
        self._position = 0
        """Items handed out since the start."""
        self._open: set[int] = set()
        """Positions of items that were begun and not ended."""
        self._again: list[int] = []
        """Those that a run before this one had begun."""
        self._lock = threading.Lock()

    def take(self, num_items: int) -> list[T]:
        begun = [self.begin() for _ in range(num_items)]
        self.end(position for position, _ in begun)
        return [item for _, item in begun]

    def begin(self) -> tuple[int, T]:
        """The next item and its position, for `end`. A state that was saved in between has it again."""
        with self._lock:
            if self._again:
                position = self._again.pop(0)
            else:
                position, self._position = self._position, self._position + 1
            self._open.add(position)
            return position, self._at(position)

    def end(self, positions: Iterable[int]) -> None:
        with self._lock:
            self._open -= set(positions)

    def state_dict(self) -> dict[str, Any]:
        """May be asked from another thread than the one that begins and ends items."""
        with self._lock:
            state = {"position": self._position, "num_items": len(self._items), "seed": self._seed}
            return {**state, "open": sorted([*self._open, *self._again])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError if the state belongs to other data or another seed: the order would not be continued."""
        for name, here in (("num_items", len(self._items)), ("seed", self._seed)):
            if state[name] != here:
                raise ValueError(
                    f"the checkpoint's data position has {name}={state[name]}, this run {here}:"
                    " resume with the same data files and run.seed, or start in a new run.dir"
                )
        self._position, self._again = state["position"], list(state.get("open", ()))

    def _at(self, position: int) -> T:
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
