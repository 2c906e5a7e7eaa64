"""Gives the rows at any position of a shuffled data set, reading the next window ahead of need."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mcore_rl.data.rows import Row
from mcore_rl.data.streamed.chunks import ChunkReader, ChunkRows
from mcore_rl.data.streamed.index import RowIndex
from mcore_rl.data.streamed.order import EpochOrder, permutation, plan_epoch
from mcore_rl.types import Array

READ_TIMEOUT_S = 600.0
"""Deadline of reading a window from the file system."""
BLOCK_ROWS = 1024
"""Rows that become Python objects at once: the fewer, the more calls to Arrow there are per row."""
IN_MEMORY = 2
"""Windows: the one that rows are taken from, and the one after or before it."""


@dataclass(frozen=True)
class RawRow:
    """A row as it is in its file; `index` is its number in the data set, `row` None if blank."""

    index: int
    where: str
    row: Row | None


@dataclass(frozen=True)
class _Window:
    """Rows of a window. chunk_R, number_R: chunk of each row and number of the row in it."""

    chunks: Mapping[int, ChunkRows]
    chunk_R: Array
    number_R: Array


class Windows:
    """The rows of a data set in the order of epoch after epoch, by position since the start."""

    def __init__(self, index: RowIndex, columns: Sequence[str], seed: int, shuffle: bool) -> None:
        self._index = index
        self._reader = ChunkReader(index, columns)
        self._seed = seed
        self._shuffle = shuffle
        self._order_of = lru_cache(maxsize=IN_MEMORY)(self._plan)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-prompts")
        self._block: tuple[tuple[int, int, int], list[RawRow]] = ((-1, -1, -1), [])
        """The rows that were made last, and their epoch, window and block in the window."""
        self._windows: OrderedDict[tuple[int, int], Future[_Window]] = OrderedDict()

    @property
    def num_rows(self) -> int:
        return self._index.num_rows

    def digest(self) -> str:
        """Return a hash of the data set; see RowIndex.digest."""
        return self._index.digest()

    def rows(self, position: int, count: int) -> list[RawRow]:
        """Return up to `count` rows from `position` on, at least one; fewer where a block ends."""
        epoch, place = divmod(position, self.num_rows)
        order = self._order_of(epoch)
        number = order.window_of(place)
        window = self._get(epoch, number)
        self._expect_after(epoch, number, order)
        block, first = divmod(place - int(order.first_row_W1[number]), BLOCK_ROWS)
        if self._block[0] != (epoch, number, block):
            start = block * BLOCK_ROWS
            rows = self._rows_of(window, start, min(start + BLOCK_ROWS, len(window.chunk_R)))
            self._block = ((epoch, number, block), rows)
        return self._block[1][first : first + count]

    def close(self) -> None:
        """End the thread that reads ahead, once it has read what it began."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _plan(self, epoch: int) -> EpochOrder:
        return plan_epoch(self._index.rows_C, self._seed, epoch, self._shuffle)

    def _get(self, epoch: int, number: int) -> _Window:
        future = self._expect(epoch, number)
        try:
            return future.result(READ_TIMEOUT_S)
        except FutureTimeout:
            raise TimeoutError(
                f"window {number} of the prompts of epoch {epoch} was not read within"
                f" {READ_TIMEOUT_S:g} s: check the file system of"
                f" {self._index.files[0]}, or set a smaller data.window_mib"
            ) from None

    def _expect(self, epoch: int, number: int) -> "Future[_Window]":
        key = (epoch, number)
        if key not in self._windows:
            while len(self._windows) >= IN_MEMORY:
                self._windows.popitem(last=False)[1].cancel()
            self._windows[key] = self._thread.submit(self._read, epoch, number)
        self._windows.move_to_end(key)
        return self._windows[key]

    def _expect_after(self, epoch: int, number: int, order: EpochOrder) -> None:
        """Begin to read the window after this one, which stays the last to be dropped."""
        following = (epoch, number + 1) if number + 1 < order.num_windows else (epoch + 1, 0)
        if following not in self._windows:
            self._expect(*following)
            self._windows.move_to_end((epoch, number))

    def _read(self, epoch: int, number: int) -> _Window:
        """Runs in the thread."""
        chunks = self._order_of(epoch).chunks_of(number)
        rows_K = self._index.rows_C[chunks]
        chunk_R = np.repeat(chunks, rows_K)
        number_R = np.concatenate([np.arange(rows) for rows in rows_K])
        if self._shuffle:
            order_R = permutation(len(chunk_R), self._seed, epoch, number + 1)
            chunk_R = chunk_R[order_R]
            number_R = number_R[order_R]
        return _Window(self._reader.read(chunks.tolist()), chunk_R, number_R)

    def _rows_of(self, window: _Window, start: int, stop: int) -> list[RawRow]:
        chunk_R = window.chunk_R[start:stop]
        number_R = window.number_R[start:stop]
        found: list[RawRow | None] = [None] * len(chunk_R)
        for chunk in np.unique(chunk_R).tolist():
            places = np.flatnonzero(chunk_R == chunk).tolist()
            numbers = number_R[places].tolist()
            first = int(self._index.first_C[chunk])
            rows = window.chunks[chunk].rows(numbers)
            for place, number, (where, row) in zip(places, numbers, rows, strict=True):
                found[place] = RawRow(first + number, where, row)
        return [row for row in found if row is not None]
