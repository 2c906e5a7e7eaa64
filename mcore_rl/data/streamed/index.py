"""Finds the chunks of contiguous rows that a data set consists of, without reading the rows.

Of parquet files only the footers are read. Lines of jsonl files are counted.
Axes: F files, C chunks.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.data.rows import parse_line
from mcore_rl.types import Array

READERS = 4
"""Files that are looked into at once."""
SAMPLED_FILES = 16
SAMPLED_ROWS = 256
PIECE_BYTES = 1 << 24
BUFFER_BYTES = 1 << 18
"""Bytes of a column that are read at once."""
Check = Callable[[str, Sequence[str]], None]
"""Refuses a file (its name for messages) by its columns, those in structs as "struct.name"."""


@dataclass(frozen=True)
class RowIndex:
    """The chunks of a data set, in the order of its files.

    files         all files, the empty ones too
    bytes_F       size of each file
    rows_C        rows of each chunk
    first_C       rows of the data set before the chunk
    file_C        the file that holds it
    file_row_C    rows of this file before it
    block_C       parquet: its row group; jsonl: the byte it begins at
    skip_C        parquet: rows of the row group before it; jsonl: the byte it ends before
    """

    files: tuple[str, ...]
    bytes_F: Array
    rows_C: Array
    first_C: Array
    file_C: Array
    file_row_C: Array
    block_C: Array
    skip_C: Array

    @property
    def num_rows(self) -> int:
        return int(self.rows_C.sum())

    def is_parquet(self, chunk: int) -> bool:
        return self.file_of(chunk).endswith(".parquet")

    def digest(self) -> str:
        """Return a hash of what decides the order of rows, and of the files' sizes.

        The files may have moved.
        """
        parts = [self.bytes_F, self.rows_C]
        return hashlib.sha256(b"".join(p.astype("<i8").tobytes() for p in parts)).hexdigest()[:16]

    def file_of(self, chunk: int) -> str:
        return self.files[self.file_C[chunk]]


def index_rows(
    files: Sequence[str], columns: Sequence[str], chunk_bytes: int, check: Check
) -> RowIndex:
    """Return the chunks of `files`, each of about `chunk_bytes` in memory, at least a row.

    Raises ValueError naming the file if one cannot be read, naming all files if none has a row, and
    as `check` does. `columns`: those that will be read.
    """
    rows_per_chunk = max(1, chunk_bytes // _row_bytes(files, columns))
    look = partial(_chunks_of, chunk_bytes=chunk_bytes, rows_per_chunk=rows_per_chunk, check=check)
    with ThreadPoolExecutor(READERS) as pool:
        found = list(pool.map(look, files))
    counts = [len(chunks) for chunks in found]
    if not sum(counts):
        raise ValueError(
            f"data files {', '.join(files):.500}: no row in {len(files)} files; leave them out, or"
            " write them again"
        )
    table = np.array([chunk for chunks in found for chunk in chunks], dtype=np.int64)
    file_row_C, rows_C, block_C, skip_C = table.T
    return RowIndex(
        files=tuple(files),
        bytes_F=np.array([Path(name).stat().st_size for name in files], dtype=np.int64),
        rows_C=rows_C,
        first_C=np.cumsum(rows_C) - rows_C,
        file_C=np.repeat(np.arange(len(files)), counts),
        file_row_C=file_row_C,
        block_C=block_C,
        skip_C=skip_C,
    )


def count_rows(files: Sequence[str], stop_above: int) -> int:
    """Return the number of rows, or some number above `stop_above` as soon as it is reached."""
    num_rows = 0
    for name in files:
        if name.endswith(".parquet"):
            num_rows += open_parquet(name).metadata.num_rows
        else:
            for piece in _pieces(name):
                num_rows += piece.count(b"\n")
                if num_rows > stop_above:
                    return num_rows
            num_rows += 1  # the last line may lack its end
        if num_rows > stop_above:
            return num_rows
    return num_rows


def open_parquet(name: str) -> pq.ParquetFile:
    """Open a file to be read in small pieces. Raises ValueError if it is none or damaged."""
    try:
        return pq.ParquetFile(name, buffer_size=BUFFER_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(name, error) from None


def unreadable(name: str, error: Exception) -> ValueError:
    """Return the error of a file that cannot be read."""
    first_line = str(error).partition("\n")[0]
    return ValueError(
        f"data file {name} cannot be read ({type(error).__name__}: {first_line}); copy it again"
    )


def columns_of(fields: Iterable[pa.Field], prefix: str = "") -> list[str]:
    """Return the names of columns; those of columns in structs are "struct.name"."""
    names: list[str] = []
    for column in fields:
        names.append(f"{prefix}{column.name}")
        if pa.types.is_struct(column.type):
            names += columns_of(column.type.fields, f"{prefix}{column.name}.")
    return names


def keys_of(row: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the keys of a row; those of keys in mappings are "mapping.key"."""
    names: list[str] = []
    for key, value in row.items():
        names.append(f"{prefix}{key}")
        if isinstance(value, Mapping):
            names += keys_of(value, f"{prefix}{key}.")
    return names


Chunk = tuple[int, int, int, int]
"""(rows of the file before it, its rows, block, skip); see RowIndex."""


def _chunks_of(name: str, chunk_bytes: int, rows_per_chunk: int, check: Check) -> list[Chunk]:
    if name.endswith(".parquet"):
        return list(_parquet_chunks(name, rows_per_chunk, check))
    return list(_jsonl_chunks(name, chunk_bytes, check))


def _parquet_chunks(name: str, rows_per_chunk: int, check: Check) -> Iterator[Chunk]:
    """Cut each row group into chunks whose sizes differ by at most a row."""
    with open_parquet(name) as file:
        check(name, columns_of(file.schema_arrow))
        metadata = file.metadata
        rows_before = 0
        for group in range(metadata.num_row_groups):
            num_rows = metadata.row_group(group).num_rows
            num_chunks = -(-num_rows // rows_per_chunk)
            for i in range(num_chunks):
                start = i * num_rows // num_chunks
                stop = (i + 1) * num_rows // num_chunks
                yield rows_before + start, stop - start, group, start
            rows_before += num_rows


def _jsonl_chunks(name: str, chunk_bytes: int, check: Check) -> Iterator[Chunk]:
    r"""Yield chunks that end after the first "\n" beyond `chunk_bytes`."""
    offset = begin = rows_before = num_rows = 0
    is_first = True
    tail = b"\n"
    for piece in _pieces(name):
        if is_first:
            line = piece.partition(b"\n")[0]
            is_whole = len(line) < len(piece) or len(piece) < PIECE_BYTES
            if line.strip() and is_whole:
                check(f"{name} line 1", keys_of(parse_line(line, f"{name} line 1")))
            is_first = False
        at = 0
        while at < len(piece):
            end = piece.find(b"\n", max(at, begin + chunk_bytes - offset))
            stop = len(piece) if end < 0 else end + 1
            num_rows += piece.count(b"\n", at, stop)
            if end >= 0:
                yield rows_before, num_rows, begin, offset + stop
                rows_before += num_rows
                num_rows = 0
                begin = offset + stop
            at = stop
        offset += len(piece)
        tail = piece[-1:]
    num_rows += tail != b"\n"
    if num_rows:
        yield rows_before, num_rows, begin, offset


def _pieces(name: str) -> Iterator[bytes]:
    try:
        with Path(name).open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
    except OSError as error:
        raise unreadable(name, error) from None


def _row_bytes(files: Sequence[str], columns: Sequence[str]) -> int:
    """Return the bytes of a row in memory: the mean of the first rows, in the file of the largest.

    Footers do not tell: columns may be dictionaries, which take more space once they are read.
    """
    parquet = [name for name in files if name.endswith(".parquet")]
    step = -(-len(parquet) // SAMPLED_FILES) or 1
    return max((_row_bytes_of(name, columns) for name in parquet[::step]), default=1)


def _row_bytes_of(name: str, columns: Sequence[str]) -> int:
    with open_parquet(name) as file:
        has = [column for column in columns if column in file.schema_arrow.names]
        try:
            batch = next(file.iter_batches(SAMPLED_ROWS, columns=has), None)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(name, error) from None
    if batch is None or not batch.num_rows:
        return 1
    return max(1, -(-batch.nbytes // batch.num_rows))
