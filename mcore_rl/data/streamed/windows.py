r"""Reads the rows of a shuffled data set at any position, and the next window ahead of need.

The order is drawn from seed and epoch. Chunks of rows are shuffled, and rows within a window of
chunks:

    files      |chunk|chunk|chunk|chunk|chunk|chunk|chunk|chunk|      contiguous rows each
                   \  chunks in a random order, cut into windows  /
    windows    [chunk 6  chunk 1  chunk 4] [chunk 0  chunk 7 ...] ...
                   \  rows of a window in a random order  /
    positions  row, row, row, ...

Any position of any epoch is found without drawing those before it. Single rows become Python
objects when they are asked for. Axes: C chunks, W windows.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from mcore_rl.data.rows import Row, parse_line, python_rows
from mcore_rl.data.streamed.index import RowIndex, open_parquet, unreadable
from mcore_rl.types import Array

CHUNKS_PER_WINDOW = 64
"""Places of the files that a window's rows come from."""
BATCH_ROWS = 1024
"""Rows of a row group that are decoded at once."""
READ_TIMEOUT_S = 600.0
"""Deadline of reading a window from the file system."""
BLOCK_ROWS = 1024
"""Rows that become Python objects at once: the fewer, the more calls to Arrow there are per row."""
IN_MEMORY = 2
"""Windows: the one that rows are taken from, and the one after or before it."""


@dataclass(frozen=True)
class EpochOrder:
    """Order of one epoch. order_C: chunks as they are drawn.

    first_chunk_W1    place in order_C of each window's first chunk, and the number of chunks
    first_row_W1      position of each window's first row in the epoch, and the number of rows
    """

    order_C: Array
    first_chunk_W1: Array
    first_row_W1: Array

    @property
    def num_windows(self) -> int:
        return len(self.first_row_W1) - 1

    def window_of(self, place: int) -> int:
        """Return the window that holds a position of this epoch."""
        return int(np.searchsorted(self.first_row_W1, place, side="right")) - 1

    def chunks_of(self, window: int) -> Array:
        """Return the chunks of a window."""
        return self.order_C[self.first_chunk_W1[window] : self.first_chunk_W1[window + 1]]


def plan_epoch(rows_C: Array, seed: int, epoch: int, shuffle: bool) -> EpochOrder:
    """Return the order of an epoch over chunks of `rows_C` rows each."""
    num_chunks = len(rows_C)
    num_windows = -(-num_chunks // CHUNKS_PER_WINDOW)
    order_C = permutation(num_chunks, seed, epoch) if shuffle else np.arange(num_chunks)
    first_chunk_W1 = np.arange(num_windows + 1) * num_chunks // num_windows
    rows_before = np.concatenate([[0], np.cumsum(rows_C[order_C])])
    return EpochOrder(order_C, first_chunk_W1, rows_before[first_chunk_W1])


def permutation(size: int, *key: int) -> Array:
    """Return the numbers below `size` in an order drawn from `key` alone.

    It sorts raw bits of PCG64, whose stream is the same in every version of numpy; that of
    Generator.permutation need not be.
    """
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(size)
    return np.argsort(bits, kind="stable")


class ChunkRows(Protocol):
    """The rows of a chunk in memory."""

    def rows(self, numbers: Sequence[int]) -> list[tuple[str, Row | None]]:
        """Return (place for error messages, row) of rows of the chunk, None for a blank line."""
        ...


@dataclass(frozen=True)
class _ParquetRows:
    file: str
    first_row: int
    table: pa.Table

    def rows(self, numbers: Sequence[int]) -> list[tuple[str, Row | None]]:
        rows = python_rows(self.table.take(pa.array(numbers)), self.file)
        return [
            (f"{self.file} row {self.first_row + number}", row)
            for number, row in zip(numbers, rows, strict=True)
        ]


@dataclass(frozen=True)
class _JsonlRows:
    file: str
    first_row: int
    text: bytes
    starts: Array

    def rows(self, numbers: Sequence[int]) -> list[tuple[str, Row | None]]:
        return [self._row(number) for number in numbers]

    def _row(self, number: int) -> tuple[str, Row | None]:
        where = f"{self.file} line {self.first_row + number + 1}"
        line = self.text[self.starts[number] : self.starts[number + 1]]
        return where, parse_line(line, where) if line.strip() else None


class ChunkReader:
    """Reads chunks; `columns` are those that parquet files are reduced to, if they have them."""

    def __init__(self, index: RowIndex, columns: Sequence[str]) -> None:
        self._index = index
        self._columns = columns

    def read(self, chunks: Sequence[int]) -> Mapping[int, ChunkRows]:
        """Return the rows of chunks, by chunk. Each row group is read once, up to its last chunk.

        Raises ValueError naming the file if it cannot be read or has changed.
        """
        index = self._index
        in_order = sorted(int(chunk) for chunk in chunks)
        read: dict[int, ChunkRows] = {}
        for _, group in groupby(in_order, key=self._place):
            members = list(group)
            if index.is_parquet(members[0]):
                read |= self._read_parquet(members)
            else:
                read |= {chunk: self._read_jsonl(chunk) for chunk in members}
        return read

    def _place(self, chunk: int) -> tuple[int, int]:
        """Return what is read at once: a row group of a file, or a chunk of lines."""
        return int(self._index.file_C[chunk]), int(self._index.block_C[chunk])

    def _read_parquet(self, chunks: Sequence[int]) -> dict[int, ChunkRows]:
        index = self._index
        name = index.file_of(chunks[0])
        spans = [(int(index.skip_C[c]), int(index.skip_C[c] + index.rows_C[c])) for c in chunks]
        try:
            tables = self._spans(name, int(index.block_C[chunks[0]]), spans)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(name, error) from None
        read: dict[int, ChunkRows] = {}
        for chunk, table in zip(chunks, tables, strict=True):
            self._check_rows(chunk, table.num_rows)
            read[chunk] = _ParquetRows(name, int(index.file_row_C[chunk]), table)
        return read

    def _spans(self, name: str, group: int, spans: Sequence[tuple[int, int]]) -> list[pa.Table]:
        """Return the rows of each span of a row group, holding one batch of it besides them."""
        with open_parquet(name) as file:
            columns = [column for column in self._columns if column in file.schema_arrow.names]
            schema = pa.schema([file.schema_arrow.field(column) for column in columns])
            batches = file.iter_batches(
                BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False
            )
            parts: list[list[pa.RecordBatch]] = [[] for _ in spans]
            end = 0
            while end < spans[-1][1] and (batch := next(batches, None)) is not None:
                begin = end
                end += batch.num_rows
                for found, (start, stop) in zip(parts, spans, strict=True):
                    inside = range(max(start, begin) - begin, min(stop, end) - begin)
                    if inside:
                        # Copied: a slice would keep the whole batch for a few of its rows.
                        found.append(batch.take(pa.array(inside)))
        return [pa.Table.from_batches(found, schema) for found in parts]

    def _read_jsonl(self, chunk: int) -> ChunkRows:
        index = self._index
        name = index.file_of(chunk)
        begin, end = int(index.block_C[chunk]), int(index.skip_C[chunk])
        try:
            with Path(name).open("rb") as file:
                file.seek(begin)
                text = file.read(end - begin)
        except OSError as error:
            raise unreadable(name, error) from None
        ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")) + 1
        if len(text) and (not len(ends) or ends[-1] != len(text)):
            ends = np.append(ends, len(text))
        self._check_rows(chunk, len(ends))
        starts = np.concatenate([[0], ends])
        return _JsonlRows(name, int(index.file_row_C[chunk]), text, starts)

    def _check_rows(self, chunk: int, num_rows: int) -> None:
        expected = int(self._index.rows_C[chunk])
        if num_rows != expected:
            name = self._index.file_of(chunk)
            raise ValueError(
                f"data file {name} has changed since the run began: {num_rows} rows where there"
                f" were {expected}; start the run again"
            )


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
