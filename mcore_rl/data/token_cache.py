"""Keeps lists of token ids on disk by key, one .npz file each."""

import logging
import os
import uuid
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

_log = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """Return mcore_rl/tokens in $XDG_CACHE_HOME, or in ~/.cache if that is not set."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mcore_rl" / "tokens"


def token_cache_dir(cache_dir: str) -> Path:
    """Return the folder that keeps token ids: data.cache_dir, or the default if it is empty."""
    return Path(cache_dir) if cache_dir else default_cache_dir()


class TokenCache:
    """A folder of entries. Several runs may share it: files appear whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(
        self, key: str, num_rows: int, make: Callable[[], Sequence[Sequence[int]]]
    ) -> Sequence[Sequence[int]]:
        """Return the entry of `num_rows` lists under `key`; make and keep it if there is none.

        An entry that cannot be read, or has another number of rows, counts as none and is replaced.
        A folder that cannot be written costs a warning.
        """
        path = self._folder / f"{key}.npz"
        rows = _read(path, num_rows)
        if rows is None:
            rows = make()
            try:
                _write(path, rows)
            except OSError as error:
                _log.warning("token ids are not kept in %s: %s", self._folder, error)
        return rows


def _read(path: Path, num_rows: int) -> list[list[int]] | None:
    """Return the rows; None if the file is missing or damaged, by its checksum (CRC-32) too."""
    try:
        with np.load(path, allow_pickle=False) as entry:
            ids = entry["ids"]
            lens = entry["lens"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        _log.warning("cached token ids in %s are damaged and made anew: %s", path, error)
        return None
    if len(lens) != num_rows or int(lens.sum()) != len(ids):
        _log.warning("cached token ids in %s do not fit their file and are made anew", path)
        return None
    flat = ids.tolist()
    stops = lens.cumsum().tolist()
    return [flat[stop - length : stop] for stop, length in zip(stops, lens.tolist(), strict=True)]


def _write(path: Path, rows: Sequence[Sequence[int]]) -> None:
    """Write under a temporary name first, so that a file of this name is always whole."""
    lens = np.array([len(row) for row in rows], dtype=np.int64)
    ids = np.fromiter((value for row in rows for value in row), dtype=np.int32, count=lens.sum())
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:  # umask decides who may read it
            np.savez(file, ids=ids, lens=lens)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
