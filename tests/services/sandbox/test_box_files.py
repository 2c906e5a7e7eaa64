"""Files of a box survive the way in and out, and no link leads out of it."""

import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.services.sandbox.box_files import pack, read_bundle, unpack, write_bundle

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20)


def bundle(files: dict[str, bytes]) -> io.BytesIO:
    stream = io.BytesIO()
    write_bundle(files, stream)
    stream.seek(0)
    return stream


@given(st.dictionaries(NAMES, st.binary(max_size=100)))
def test_a_bundle_gives_back_its_files(files: dict[str, bytes]) -> None:
    assert read_bundle(bundle(files)) == files


def test_a_bundle_that_is_cut_off_is_noticed() -> None:
    data = bundle({"a": b"123"}).getvalue()
    with pytest.raises(ValueError, match="ends within a"):
        read_bundle(io.BytesIO(data[:-1]))


def test_files_go_in_and_out(tmp_path: Path) -> None:
    files = {"a": b"1", "d/e/f": b"2", "d/g": b""}
    unpack(str(tmp_path), bundle(files), None)
    unpack(str(tmp_path), bundle({"a": b"3"}), None)
    out = io.BytesIO()
    assert pack(str(tmp_path), None, 10, out) == ""
    out.seek(0)
    assert read_bundle(out) == files | {"a": b"3"}


@pytest.mark.parametrize(
    "path", ["link", "folder/secret", "../secret", "pipe", "none", "/etc/passwd"]
)
def test_what_is_no_file_of_the_box_is_left_out(path: str, tmp_path: Path) -> None:
    box = tmp_path / "box"
    box.mkdir()
    (tmp_path / "secret").write_text("secret")
    (box / "link").symlink_to("../secret")
    (box / "folder").symlink_to("..")
    os.mkfifo(box / "pipe")
    out = io.BytesIO()
    assert pack(str(box), [path], 100, out) == ""
    out.seek(0)
    assert read_bundle(out) == {}
    out = io.BytesIO()
    assert pack(str(box), None, 100, out) == ""
    out.seek(0)
    assert read_bundle(out) == {}


@pytest.mark.parametrize("path", ["link", "folder/new", "../new"])
def test_nothing_is_written_over_a_link(path: str, tmp_path: Path) -> None:
    box = tmp_path / "box"
    box.mkdir()
    (tmp_path / "secret").write_text("secret")
    (box / "link").symlink_to("../secret")
    (box / "folder").symlink_to("..")
    with pytest.raises(OSError):
        unpack(str(box), bundle({path: b"x"}), None)
    assert (tmp_path / "secret").read_text() == "secret"
    assert not (tmp_path / "new").exists()


def test_too_many_bytes_are_refused_with_an_empty_bundle(tmp_path: Path) -> None:
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    out = io.BytesIO()
    assert "more than 9 bytes" in pack(str(tmp_path), None, 9, out)
    out.seek(0)
    assert read_bundle(out) == {}
