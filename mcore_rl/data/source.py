"""A list in, an endless shuffled stream of its items out, whose position can be saved and restored."""

from collections.abc import Sequence
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

    def take(self, num_items: int) -> list[T]:
        start, self._position = self._position, self._position + num_items
        return [self._at(i) for i in range(start, start + num_items)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "num_items": len(self._items), "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError if the state belongs to other data or another seed: the order would not be continued."""
        for name, here in (("num_items", len(self._items)), ("seed", self._seed)):
            if state[name] != here:
                raise ValueError(
                    f"the checkpoint's data position has {name}={state[name]}, this run {here}:"
                    " resume with the same data files and run.seed, or start in a new run.dir"
                )
        self._position = state["position"]

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
