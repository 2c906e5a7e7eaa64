"""Says what a worker asks of the sample stores of all collectors, and how one beside a store asks.

Every read and write raises SamplesLostError if a store lost its process, once the others have
answered.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from mcore_rl.batches.assembly import OwnTokens, all_tokens
from mcore_rl.batches.kept_rows import ReadRequest
from mcore_rl.types import Array, StoredBatch, TrainBatch


class SampleStores(Protocol):
    """The stores of all collectors, by number. Raises RuntimeError naming a store that failed."""

    def read(self, requests: Mapping[int, ReadRequest]) -> dict[int, Mapping[str, Array]]:
        """Return columns by store and name."""
        ...

    def write(self, parts: Mapping[int, tuple[Array, Array, Mapping[str, Array]]]) -> None:
        """Write (group_N, index_N, columns by name) by store."""
        ...

    def assemble_parts(
        self,
        batch: StoredBatch,
        layers: Sequence[int],
        own_tokens: OwnTokens = all_tokens,
        seen_tokens: OwnTokens = all_tokens,
    ) -> list[TrainBatch]:
        """Return the batch's micro-batches; see batches.assembly.assemble_parts."""
        ...

    def with_images(
        self, parts: Sequence[TrainBatch], batch: StoredBatch, *, with_pixels: bool
    ) -> list[TrainBatch]:
        """Return the batch's micro-batches with the images of their sequences.

        with_pixels   False: only grids are read, and pixels are on the meta device
        """
        ...

    def scatter_parts(self, batch: StoredBatch, columns: Mapping[str, Sequence[Tensor]]) -> None:
        """Bring the values of micro-batches' tokens, by column, to the stores of their samples."""
        ...


class StoresBeside:
    """All stores, as seen by the process of one store, which reads its own without a call."""

    def __init__(
        self,
        others: SampleStores,
        own: int,
        read: Callable[[ReadRequest], Mapping[str, Array]],
        write: Callable[[Array, Array, Mapping[str, Array]], None],
    ) -> None:
        """`read` and `write` are those of store `own`; `others` reaches the other stores."""
        self._others = others
        self._own = own
        self._read = read
        self._write = write

    def read(self, requests: Mapping[int, ReadRequest]) -> dict[int, Mapping[str, Array]]:
        """See SampleStores.read."""
        far = {store: request for store, request in requests.items() if store != self._own}
        answers = self._others.read(far)
        if self._own in requests:
            answers[self._own] = self._read(requests[self._own])
        return answers

    def write(self, parts: Mapping[int, tuple[Array, Array, Mapping[str, Array]]]) -> None:
        """See SampleStores.write."""
        self._others.write({store: part for store, part in parts.items() if store != self._own})
        if self._own in parts:
            self._write(*parts[self._own])
