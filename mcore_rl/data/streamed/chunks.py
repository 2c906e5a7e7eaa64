"""Reads chunks of a data set and turns single rows of them into Python objects when asked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from mcore_rl.data.rows import Row, parse_line, python_rows
from mcore_rl.data.streamed.index import RowIndex, open_parquet, unreadable
from mcore_rl.types import Array

BATCH_ROWS = 1024
"""Rows of a row group that are decoded at once."""


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
