"""Cached token ids: what is put in comes out, and damaged entries are made anew."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.data.tokenization import TokenCache, default_cache_dir

ROWS = [[1, 2, 3], [], [2**31 - 1]]


def not_called() -> list[list[int]]:
    raise AssertionError("the entry was there")


@given(st.lists(st.lists(st.integers(0, 2**31 - 1))))
def test_rows_come_back(tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]]) -> None:
    cache = TokenCache(tmp_path_factory.mktemp("cache"))
    assert cache.get("key", len(rows), lambda: rows) == rows
    assert cache.get("key", len(rows), not_called) == rows


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_umask_decides_who_may_read_them(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        TokenCache(tmp_path / "cache").get("key", len(ROWS), lambda: ROWS)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "cache").rglob("*.npz")}
    assert modes == {0o666 & ~umask}


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    place = data.index(np.array([1, 2, 3], dtype=np.int32).tobytes())
    data[place] ^= 1
    path.write_bytes(data)


def pickle_inside(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, ids=np.array([{}], dtype=object), lens=np.array([1]))


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        pickle_inside,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"no zip file"),
        lambda path: path.write_bytes(path.read_bytes()[:-40]),
        lambda path: np.savez(path, ids=np.arange(3, dtype=np.int32)),
        lambda path: np.savez(path, ids=np.arange(3, dtype=np.int32), lens=np.array([1, 1, 2])),
        lambda path: np.savez(path, ids=np.arange(4, dtype=np.int32), lens=np.array([2, 2])),
    ],
)
def test_a_damaged_entry_is_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    cache = TokenCache(tmp_path)
    cache.get("key", 3, lambda: ROWS)
    (path,) = tmp_path.iterdir()
    damage(path)
    assert cache.get("key", 3, lambda: ROWS) == ROWS
    assert "made anew" in caplog.text
    assert cache.get("key", 3, not_called) == ROWS
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_no_file_behind(tmp_path: Path) -> None:
    with pytest.raises(OverflowError):
        TokenCache(tmp_path).get("key", 1, lambda: [[2**40]])
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "mcore_rl" / "tokens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "mcore_rl" / "tokens"
