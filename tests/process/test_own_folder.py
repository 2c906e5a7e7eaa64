"""A folder whose name others know is used only if nobody else can write there."""

import os
import tempfile
from pathlib import Path

import pytest

from mcore_rl.process.own_folder import INDUCTOR, compile_cache, make_own_folder


def test_a_new_folder_is_for_this_user_alone_and_shared_by_runs(tmp_path: Path) -> None:
    folder = make_own_folder(tmp_path / "cache")
    assert folder == tmp_path / "cache" and folder.stat().st_mode & 0o777 == 0o700
    assert make_own_folder(folder) == folder


@pytest.mark.parametrize("planted", ["link", "dead link", "open", "file", "another's"])
def test_what_others_planted_is_left_alone(tmp_path: Path, planted: str) -> None:
    path, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    if planted == "link":
        elsewhere.mkdir()
        path.symlink_to(elsewhere)
    elif planted == "dead link":
        path.symlink_to(elsewhere)
    elif planted == "open":
        path.mkdir()
        path.chmod(0o777)
    elif planted == "file":
        path.touch()
    else:
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        path.mkdir()
        os.chown(path, 4321, 4321)
    folder = make_own_folder(path)
    assert folder not in (path, elsewhere) and folder.stat().st_mode & 0o777 == 0o700
    assert not elsewhere.exists() or not list(elsewhere.iterdir())
    folder.rmdir()


def test_compiled_code_is_kept_per_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(INDUCTOR, raising=False)
    expected = tmp_path / f"mcore_rl_inductor_{os.getuid()}"
    assert compile_cache() == {INDUCTOR: str(expected)} and expected.is_dir()
    monkeypatch.setenv(INDUCTOR, "/mine")
    assert compile_cache() == {}
