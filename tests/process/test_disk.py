"""A full disk becomes one line with place and remedy; other errors pass through."""

import errno
import os
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.process.disk import (
    DiskFullError,
    describe_full_disk,
    is_disk_full,
    report_any_full_disk,
    report_full_disk,
    report_unwritable,
    reserve_space,
    write_whole,
)
from tests.support.small_disks import mounted


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 64 KiB."""
    with mounted(tmp_path / "small disk", "-t", "tmpfs", "-o", "size=64k") as folder:
        yield folder


def test_a_full_filesystem_is_named_with_its_free_space(small_disk: Path) -> None:
    path = small_disk / "checkpoints" / "part.bin"
    with pytest.raises(DiskFullError) as caught, report_full_disk(path):
        path.parent.mkdir()
        path.write_bytes(bytes(1 << 20))
    message = str(caught.value)
    assert message.startswith(f"cannot write {path}: no space left on device; ")
    assert f"its filesystem {small_disk} (tmpfs) has 0 bytes of 64 KiB free" in message
    assert "write to another filesystem" in message and "\n" not in message


def test_space_that_is_not_there_is_refused_before_anything_is_written(small_disk: Path) -> None:
    path = small_disk / "model.bin"
    with (
        pytest.raises(DiskFullError, match="of 64 KiB free"),
        report_full_disk(path),
        path.open("wb") as file,
    ):
        reserve_space(file.fileno(), 1 << 20)
    with path.open("r+b") as file:
        reserve_space(file.fileno(), 32 << 10)
    assert path.stat().st_size == 32 << 10
    assert path.stat().st_blocks * 512 >= 32 << 10


def test_reserved_files_keep_the_bytes_they_have(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"weights and more")
    for num_bytes, expected in [(20, b"weights and more" + bytes(4)), (7, b"weights"), (0, b"")]:
        with path.open("r+b") as file:
            reserve_space(file.fileno(), num_bytes)
        assert path.read_bytes() == expected


def test_a_filesystem_that_cannot_reserve_gives_a_file_its_size(tmp_path: Path) -> None:
    with mounted(tmp_path / "memory", "-t", "ramfs") as folder:
        path = folder / "model.bin"
        with path.open("wb") as file:
            command = ["fallocate", "-l", "8192", str(path)]
            assert b"not supported" in subprocess.run(command, capture_output=True).stderr
            reserve_space(file.fileno(), 8192)
        assert path.stat().st_size == 8192


def test_a_device_without_space_needs_no_root() -> None:
    with (
        pytest.raises(DiskFullError, match="cannot write /dev/full: no space left on device"),
        report_full_disk("/dev/full"),
        open("/dev/full", "w") as file,
    ):
        file.write("a")


def test_a_used_up_quota_is_said_as_such(tmp_path: Path) -> None:
    with (
        pytest.raises(DiskFullError, match=r"hf: the disk quota is used up; its file.* free"),
        report_full_disk(tmp_path / "hf"),
    ):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_other_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), report_full_disk(tmp_path):
        (tmp_path / "nowhere").read_text()
    with pytest.raises(KeyboardInterrupt), report_full_disk(tmp_path):
        raise KeyboardInterrupt


def test_the_error_survives_a_pickle(tmp_path: Path) -> None:
    """Ranks and workers raise it in other processes."""
    error = DiskFullError("cannot write a")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is DiskFullError and str(again) == "cannot write a"


def test_nested_reports_keep_the_innermost_file(tmp_path: Path) -> None:
    with (
        pytest.raises(DiskFullError, match=r"cannot write .*inner"),
        report_full_disk(tmp_path / "outer"),
        report_full_disk(tmp_path / "inner"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "x"), True),
        (RuntimeError("I/O error: No space left on device (os error 28)"), True),
        (OSError(errno.EACCES, "x"), False),
        (RuntimeError("os error 280"), False),
    ],
)
def test_what_counts_as_a_full_disk(error: Exception, expected: bool) -> None:
    assert is_disk_full(error) is expected
    wrapped = RuntimeError("the save failed")
    wrapped.__cause__ = error
    assert is_disk_full(wrapped) is expected


def test_what_nobody_named_is_named_by_the_file_or_by_what_is_full(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(DiskFullError, match="cannot write /some/file: no space"),
        report_any_full_disk(),
    ):
        raise RuntimeError("the save failed") from OSError(errno.ENOSPC, "full", "/some/file")
    (small_disk / "filler").write_bytes(bytes(64 << 10))
    monkeypatch.chdir(small_disk)
    with pytest.raises(DiskFullError) as caught, report_any_full_disk():
        raise RuntimeError("No space left on device")
    message = str(caught.value)
    assert message.startswith(f"cannot write a file below {small_disk}: no space left on device; ")
    assert "has 0 bytes of 64 KiB free" in message and "\n" not in message
    died = "engine http://a (log b) died; its last lines:\n  | No space left on device"
    told = pytest.raises(DiskFullError, match=r"^engine http://a .*\n.*\ncannot write a file below")
    with told, report_any_full_disk():
        raise RuntimeError(died)
    with pytest.raises(DiskFullError, match="quota is used up"), report_any_full_disk():
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    with pytest.raises(ValueError, match="as it was"), report_any_full_disk():
        raise ValueError("as it was")


def test_a_file_that_does_not_fit_leaves_the_one_before(small_disk: Path) -> None:
    path = small_disk / "made" / "parity_check.json"
    write_whole(path, "first")
    with pytest.raises(DiskFullError, match=f"cannot write {path}: no space"):
        write_whole(path, "x" * (1 << 20))
    assert path.read_text() == "first"
    assert [file.name for file in path.parent.iterdir()] == ["parity_check.json"]
    write_whole(path, "second")
    assert path.read_text() == "second"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_known_from_its_own_description(number: int, tmp_path: Path) -> None:
    """As megatron-core's writer tells the failure of a worker: by its text alone."""
    told = describe_full_disk(tmp_path, OSError(number, os.strerror(number)))
    with pytest.raises(DiskFullError), report_unwritable(tmp_path / "save"):
        raise RuntimeError("rank 0 could not write") from RuntimeError(f"Worker failure: {told}")
