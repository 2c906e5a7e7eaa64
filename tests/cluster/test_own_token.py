"""The token of a Ray that a run starts can be read by its user alone, whatever umask says."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.cluster.session import keep_own_token

NAMES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    before = os.umask(0)
    yield folder
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_new_token_is_in_the_home(home: Path, tmp_path: Path) -> None:
    with keep_own_token(tmp_path):
        assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    path = home / ".ray" / "auth_token"
    assert len(path.read_text()) == 64 and mode(path) == 0o600 and mode(path.parent) == 0o700


def test_one_that_others_can_read_is_closed(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = home / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("mine")
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING), keep_own_token(tmp_path):
        assert path.read_text() == "mine" and mode(path) == 0o600
    assert f"{path} had mode 644" in caplog.text
    caplog.clear()
    with keep_own_token(tmp_path):
        assert not caplog.text, "once"


@pytest.mark.parametrize("lacking", ["unset", "no folder"])
def test_without_a_home_it_is_in_the_runs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    if lacking == "unset":
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", "/proc/none")  # nobody can write there, root included
    tokens = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        with keep_own_token(folder):
            file = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
            assert file.parent == folder and mode(file) == 0o600
            tokens.append(file.read_text())
        assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    assert len(tokens[0]) == 64 and tokens[0] == tokens[1], "Ray reads it once per process"


@pytest.mark.parametrize("name", NAMES)
def test_a_token_of_the_user_is_kept(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "mine")
    folder = tmp_path / "run"
    folder.mkdir()
    with keep_own_token(folder):
        assert os.environ[name] == "mine" and not list(folder.iterdir())
    assert not list(home.iterdir())
