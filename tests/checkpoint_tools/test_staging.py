"""Finished units survive a run that was cut short; what changed meanwhile is done again."""

import fcntl
import zlib
from pathlib import Path

import pytest

from checkpoint_tools.output import Done, OutputFile, Unit
from checkpoint_tools.reader import ReadRecord
from checkpoint_tools.staging import JOURNAL, PARTIAL, StagedOutput, refuse_existing
from mcore_rl.weights.hf.checksums import ByteSpan, FileSums

FILES = [OutputFile("file", 30, b"header", ())]
UNITS = [Unit(0, "file", ()), Unit(1, "file", ())]


def write(staging: StagedOutput, number: int, content: bytes) -> None:
    """Carry out a unit: 12 bytes of the file after its header."""
    start = 6 + 12 * number
    with (staging.folder / "file").open("r+b") as file:
        file.seek(start)
        file.write(content)
    record = ReadRecord()
    record.read["/source"].append(ByteSpan(5, 7, 9))
    staging.finish(UNITS[number], Done((ByteSpan(start, 12, zlib.crc32(content)),), record))


def test_a_complete_folder_gets_its_name_and_checksums(tmp_path: Path) -> None:
    out = tmp_path / "out"
    staging = StagedOutput(out, "digest")
    with staging.open(FILES, UNITS):
        assert staging.done == {}
        write(staging, 1, b"b" * 12)
        write(staging, 0, b"a" * 12)
        sums = staging.file_sums(FILES, UNITS)
        staging.commit()
    content = b"header" + b"a" * 12 + b"b" * 12
    assert (out / "file").read_bytes() == content
    assert [path.name for path in out.iterdir()] == ["file"]
    spans = [(0, b"header"), (6, b"a" * 12), (18, b"b" * 12)]
    expected = [ByteSpan(start, len(data), zlib.crc32(data)) for start, data in spans]
    assert sums == {"file": FileSums(30, tuple(expected))}
    with pytest.raises(ValueError, match="out exists: choose another output"):
        refuse_existing(out)


def test_finished_units_are_found_again_if_intact(tmp_path: Path) -> None:
    first = StagedOutput(tmp_path / "out", "digest")
    with first.open(FILES, UNITS):
        write(first, 0, b"a" * 12)
        write(first, 1, b"b" * 12)
    second = StagedOutput(tmp_path / "out", "digest")
    with second.open(FILES, UNITS):
        assert second.done.keys() == {0, 1}
        assert second.done[0].record.read == {"/source": [ByteSpan(5, 7, 9)]}
    with (second.folder / "file").open("r+b") as file:
        file.seek(20)
        file.write(b"?")
    third = StagedOutput(tmp_path / "out", "digest")
    with third.open(FILES, UNITS):
        assert third.done.keys() == {0}


def test_another_digest_begins_anew(tmp_path: Path) -> None:
    first = StagedOutput(tmp_path / "out", "digest")
    with first.open(FILES, UNITS):
        write(first, 0, b"a" * 12)
        (first.folder / "index").mkdir()
    second = StagedOutput(tmp_path / "out", "other")
    with second.open(FILES, UNITS):
        assert second.done == {}
    folder = tmp_path / f"out{PARTIAL}"
    assert sorted(path.name for path in folder.iterdir()) == [JOURNAL, "file"]
    assert (folder / "file").read_bytes() == b"header" + bytes(24)


def test_two_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoint_tools.staging.LOCK_WAIT_S", 0.2)
    partial = tmp_path / f"out{PARTIAL}"
    partial.mkdir()
    with (partial / JOURNAL).open("wb") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with (
            pytest.raises(ValueError, match="is being written by another process"),
            StagedOutput(tmp_path / "out", "digest").open([], []),
        ):
            raise AssertionError("the folder is held twice")
