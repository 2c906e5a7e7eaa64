"""Files of whole groups of a store, by which finished samples outlive the process that kept them.

All that the store has is in a file, as it has it: tokens, log-probs, versions, experts and chosen
keys come back bit for bit.
"""

import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.batches.kept_rows import KeptRow
from mcore_rl.batches.sample_store import KeptGroup
from mcore_rl.process.disk import write_whole
from mcore_rl.process.plain_pickle import load_plain


@dataclass(frozen=True)
class GroupFile:
    """A file of groups, as its writer knows it.

    crc   CRC-32 of its bytes
    """

    name: str
    num_bytes: int
    crc: int


def write_groups(path: Path, groups: Mapping[int, KeptGroup]) -> GroupFile:
    """Write groups by number; they take their own size once more in memory meanwhile.

    Raises DiskFullError if there is no room for them.
    """
    return write_plain(path, {number: _take_out(group) for number, group in groups.items()})


def read_groups(folder: Path, file: GroupFile) -> dict[int, KeptGroup]:
    """Return the groups of a file by number. Raises as `read_plain` does."""
    return read_plain(folder, file)


def write_plain(path: Path, value: object) -> GroupFile:
    """Write a value of dataclasses and arrays. Raises DiskFullError if there is no room for it."""
    data = pickle.dumps(value)
    write_whole(path, data, lasting=True)
    return GroupFile(path.name, len(data), zlib.crc32(data))


def read_plain(folder: Path, file: GroupFile) -> Any:
    """Return the value of a file.

    Raises ValueError if it does not have the bytes that were written, or names what is no plain
    value, and OSError if it is not there.
    """
    path = folder / file.name
    data = path.read_bytes()
    if (len(data), zlib.crc32(data)) != (file.num_bytes, file.crc):
        raise ValueError(
            f"{path} is damaged: its {len(data)} bytes are not those that were written"
        )
    return load_plain(data, path)


def _take_out(group: KeptGroup) -> KeptGroup:
    """Return the group with all its arrays in memory, also those that the store has in files."""
    return KeptGroup(group.samples, [list(map(_take_row_out, rows)) for rows in group.rows_of])


def _take_row_out(row: KeptRow) -> KeptRow:
    return replace(row, columns={name: np.array(own) for name, own in row.columns.items()})
