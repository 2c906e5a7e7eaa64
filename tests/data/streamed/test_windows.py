"""Rows by position: each once an epoch, whatever position is read, from all over the files."""

from itertools import pairwise
from pathlib import Path

import pytest

from mcore_rl.data.streamed import windows
from mcore_rl.data.streamed import windows as module
from mcore_rl.data.streamed.windows import Windows
from tests.support.prompt_sets import RULES, open_index, write_rows

SIZES = [40, 3, 57]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "CHUNKS_PER_WINDOW", 8)
    monkeypatch.setattr(module, "BLOCK_ROWS", 5)


def read(windows: Windows, start: int, stop: int) -> list[int]:
    """Return the index of each row from `start` to before `stop`."""
    found: list[int] = []
    while start + len(found) < stop:
        found += [row.index for row in windows.rows(start + len(found), stop - start - len(found))]
    return found


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_each_epoch_has_every_row_once_in_an_order_of_its_own(tmp_path: Path, kind: str) -> None:
    index = open_index(write_rows(tmp_path, SIZES, kind))
    epochs = []
    for seed in (0, 1):
        windows = Windows(index, RULES.columns, seed, shuffle=True)
        assert windows.num_rows == 100
        rows = read(windows, 0, 300)
        epochs += [tuple(rows[start : start + 100]) for start in (0, 100, 200)]
        windows.close()
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len(set(epochs)) == 6


def test_any_position_is_read_without_those_before(tmp_path: Path) -> None:
    index = open_index(write_rows(tmp_path, SIZES))
    windows = Windows(index, RULES.columns, 0, shuffle=True)
    expected = read(windows, 0, 220)
    for position in range(0, 200, 7):
        fresh = Windows(index, RULES.columns, 0, shuffle=True)
        assert read(fresh, position, position + 20) == expected[position : position + 20]
        fresh.close()
    backwards = [read(windows, position, position + 1)[0] for position in reversed(range(220))]
    assert backwards[::-1] == expected
    windows.close()


def test_a_window_takes_rows_from_all_over_the_files(tmp_path: Path) -> None:
    index = open_index(write_rows(tmp_path, [50] * 4), chunk_bytes=1500)
    windows = Windows(index, RULES.columns, 0, shuffle=True)
    num_rows = int(index.rows_C[:8].sum())
    first = read(windows, 0, num_rows)
    assert len({row // 50 for row in first}) >= 3
    neighbors = sum(abs(a - b) == 1 for a, b in pairwise(first))
    assert neighbors < num_rows / 4
    windows.close()


def test_without_shuffling_rows_come_in_the_order_of_the_files(tmp_path: Path) -> None:
    windows = Windows(open_index(write_rows(tmp_path, SIZES)), RULES.columns, 0, shuffle=False)
    assert read(windows, 0, 150) == [*range(100), *range(50)]
    windows.close()


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    files = write_rows(tmp_path, SIZES)
    windows = Windows(open_index(files), RULES.columns, 0, shuffle=True)
    for file in files:
        Path(file).unlink()
    with pytest.raises(ValueError, match=r"data file .*parquet cannot be read"):
        read(windows, 0, 100)
    windows.close()
