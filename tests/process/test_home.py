"""Commands work without a home, and under a user id that no file lists."""

import getpass
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mcore_rl.process.folders import keep_home_usable

NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME", "HF_HOME")
UNKNOWN_UID = 1_234_567


@pytest.fixture(autouse=True)
def nothing_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (*NAMES, "HOME"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)


def test_a_home_that_can_be_written_to_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    keep_home_usable()
    assert os.environ["HOME"] == str(tmp_path) and not capsys.readouterr().err


def test_the_users_own_home_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_home_usable()
    assert os.environ["HOME"] == os.path.expanduser("~") != ""


def test_a_home_that_cannot_be_written_to_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", "/proc/none")
    keep_home_usable()
    home = tmp_path / f"mcore_rl_home_{os.getuid()}"
    assert os.environ["HOME"] == str(home) and home.stat().st_mode & 0o777 == 0o700
    error = capsys.readouterr().err
    assert error == (
        f"mcore-rl: HOME=/proc/none cannot be written to: caches go to {home};"
        " set HOME to a folder that stays to keep them\n"
    )
    assert "HF_HOME" not in os.environ


def test_cached_models_of_a_read_only_home_are_still_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / ".cache" / "huggingface").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(home) and real(path, mode))
    keep_home_usable()
    assert os.environ["HF_HOME"] == str(home / ".cache" / "huggingface")
    assert os.environ["HOME"] != str(home)


def test_a_user_id_that_nobody_knows_has_a_name_and_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: UNKNOWN_UID)
    monkeypatch.setattr("mcore_rl.process.folders._is_own", lambda path: True)
    keep_home_usable()
    assert getpass.getuser() == f"uid{UNKNOWN_UID}"
    assert os.environ["HOME"] == str(tmp_path / f"mcore_rl_home_{UNKNOWN_UID}")
    assert Path.home().is_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_the_caches_have_a_place_under_any_user_id() -> None:
    code = (
        "import os, sys; from mcore_rl.process.folders import keep_home_usable;"
        "from mcore_rl.data.tokenization import default_cache_dir as cache;"
        f"os.setgid({UNKNOWN_UID}); os.setuid({UNKNOWN_UID}); keep_home_usable();"
        "cache().mkdir(parents=True); print(cache())"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": os.environ["PYTHONPATH"], "TMPDIR": folder},
            capture_output=True,
            text=True,
        )
        expected = f"{folder}/mcore_rl_home_{UNKNOWN_UID}/.cache/mcore_rl/tokens\n"
        assert done.stdout == expected, done.stderr
