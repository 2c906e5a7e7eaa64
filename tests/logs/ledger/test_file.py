"""A ledger after crashes and damage: torn ends are cut and told, damage is refused by its place."""

from pathlib import Path

import pytest

from mcore_rl.logs.ledger.balance import format_balance, read_balance
from mcore_rl.logs.ledger.file import NAME, LedgerFile, read_records
from mcore_rl.logs.ledger.ledger import LaunchEntry, RunLedger
from mcore_rl.process.log_files import find_segments

LAUNCH = LaunchEntry(0, 0, (), (5,), 0, "sync", 0, 2)


def write(path: Path, *steps: int, rotate_bytes: int = 0) -> int:
    """Append a record for each step; return the bytes of a torn line that was there."""
    file = LedgerFile(path, rotate_bytes)
    for step in steps:
        file.append({"is": "sync", "version": step})
        file.commit()
    file.close()
    return file.torn_bytes


def read(path: Path) -> list[int]:
    return [record["version"] for record in read_records(path) if record["is"] == "sync"]


def test_records_go_on_over_launches_and_segments(tmp_path: Path) -> None:
    path = tmp_path / NAME
    write(path, 1, 2, rotate_bytes=80)
    write(path, 3, 4, 5, rotate_bytes=80)
    assert read(path) == [1, 2, 3, 4, 5] and len(find_segments(path)) == 2


@pytest.mark.parametrize("num_bytes", [1, 10, 40])
def test_a_torn_last_line_is_told_and_cut_by_the_next_launch(
    num_bytes: int, tmp_path: Path
) -> None:
    path = tmp_path / NAME
    with RunLedger(path) as ledger:
        ledger.begin(LAUNCH)
    whole = path.read_bytes()
    write(path, 1)
    path.write_bytes(path.read_bytes()[: len(whole) + num_bytes])
    torn = read_balance(tmp_path)
    assert torn.holds and torn.events["torn_bytes"] == num_bytes
    assert f"a crash tore a last line: {num_bytes} bytes" in format_balance(torn)
    with RunLedger(path) as ledger:
        ledger.begin(LAUNCH)
    again = read_balance(tmp_path)
    assert again.holds and again.events["torn_bytes"] == num_bytes
    assert path.read_bytes().startswith(whole)


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [lines[0], lines[1].replace(b"2", b"7", 1), *lines[2:]],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [lines[0], lines[2], lines[1], lines[3]],
        lambda lines: [lines[0], lines[1][:20] + b"\n", *lines[2:]],
        lambda lines: [lines[0], b"\x00" * 30 + b"\n", *lines[2:]],
    ],
    ids=["changed", "missing", "moved", "torn in the middle", "zeros"],
)
def test_a_damaged_line_is_refused_by_its_place(damage, tmp_path: Path) -> None:
    path = tmp_path / NAME
    write(path, 1, 2, 3, 4)
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(ValueError, match=rf"{NAME}:2: the ledger is damaged"):
        read(path)


def test_a_lost_segment_is_refused(tmp_path: Path) -> None:
    path = tmp_path / NAME
    write(path, 1, 2, 3, 4, 5, rotate_bytes=80)
    find_segments(path)[0].unlink()
    with pytest.raises(ValueError, match=r"000002.jsonl:1: the ledger is damaged"):
        read(path)


def test_a_launch_does_not_go_on_after_a_last_line_without_its_sum(tmp_path: Path) -> None:
    path = tmp_path / NAME
    write(path, 1)
    path.write_bytes(path.read_bytes() + b'{"is":"sync"}\n')
    with pytest.raises(ValueError, match="the last line of the ledger is damaged"):
        LedgerFile(path)


def test_a_folder_without_a_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no ledger.jsonl: name the folder of a run"):
        read_balance(tmp_path)


def test_a_ledger_without_a_file_writes_nothing(tmp_path: Path) -> None:
    with RunLedger() as ledger:
        ledger.begin(LAUNCH)
        ledger.note("sync", version=1)
    assert not list(tmp_path.iterdir())
