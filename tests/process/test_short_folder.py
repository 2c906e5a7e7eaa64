"""Sockets go where their paths fit; if there is no such place, one message says so."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mcore_rl.cpu.fork_server import fork_server
from mcore_rl.process import folders
from mcore_rl.process.folders import LONGEST_PATH, TempDir, find_short_root, keep_sockets_short
from tests.support import forking

LISTENS = """
import multiprocessing, tempfile
from multiprocessing.connection import Listener
Listener(family="AF_UNIX").close()
print(tempfile.gettempdir())
"""


@pytest.fixture
def long_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / ("x" * (133 - len(str(tmp_path)) - 1))
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def test_the_bound_is_the_kernels(tmp_path: Path) -> None:
    for num_bytes, fits in ((LONGEST_PATH, True), (LONGEST_PATH + 1, False)):
        path = tmp_path / ("x" * (num_bytes - len(str(tmp_path)) - 1))
        with socket.socket(socket.AF_UNIX) as made:
            if fits:
                made.bind(str(path))
            else:
                with pytest.raises(OSError, match="path too long"):
                    made.bind(str(path))


def test_a_short_folder_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    room = LONGEST_PATH - len(str(tmp_path))
    assert find_short_root(room) == tmp_path
    assert find_short_root(room + 1) == Path("/tmp")


def test_processes_that_fork_and_engines_find_room(long_folder: Path) -> None:
    with fork_server("MCORE_RL_TEST_FORKS", forking.__name__):
        assert len(os.environ["MCORE_RL_TEST_FORKS"]) <= LONGEST_PATH
    folder = TempDir()
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"{folder.path}/tmpabcdefgh")
    finally:
        folder.remove()


def test_commands_say_where_temporary_files_go(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_sockets_short()
    expected = (
        f"mcore-rl: TMPDIR={long_folder} is too long for sockets: temporary files go to /tmp\n"
    )
    assert capsys.readouterr().err == expected
    done = subprocess.run([sys.executable, "-c", LISTENS], capture_output=True, text=True)
    assert done.stdout == "/tmp\n", done.stderr
    keep_sockets_short()
    assert capsys.readouterr().err == "", "once"


def test_no_place_is_one_message(long_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_OTHERS", (str(long_folder / "none"),))
    with pytest.raises(ValueError, match=r"a path of 143 bytes, 107 are.*at most 97 bytes"):
        find_short_root(10)
