"""A folder whose name others know is used only if nobody else can write there."""

import os
import tempfile
from pathlib import Path

import pytest
from torch.utils.cpp_extension import get_default_build_root

from mcore_rl.process.folders import INDUCTOR, find_compile_caches, make_own_folder

MODES = {"open": 0o777, "group's": 0o770}
DEFAULTS = {
    "SGLANG_CACHE_DIR": ".cache/sglang",
    "TORCH_EXTENSIONS_DIR": ".cache/torch_extensions",
    "TRITON_CACHE_DIR": ".triton/cache",
    "TVM_FFI_CACHE_DIR": ".cache/tvm-ffi",
}


def test_a_new_folder_is_for_this_user_alone_and_shared_by_runs(tmp_path: Path) -> None:
    folder = make_own_folder(tmp_path / "cache")
    assert folder == tmp_path / "cache" and folder.stat().st_mode & 0o777 == 0o700
    assert make_own_folder(folder) == folder


@pytest.mark.parametrize(
    "planted", ["link", "dead link", "open", "group's", "movable", "file", "another's"]
)
def test_what_others_planted_is_left_alone(tmp_path: Path, planted: str) -> None:
    path, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    if planted == "link":
        elsewhere.mkdir()
        path.symlink_to(elsewhere)
    elif planted == "dead link":
        path.symlink_to(elsewhere)
    elif planted in MODES:
        path.mkdir()
        path.chmod(MODES[planted])
    elif planted == "movable":
        tmp_path.chmod(0o777)
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


def test_a_folder_in_one_like_tmp_is_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert make_own_folder(tmp_path / "cache") == tmp_path / "cache"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable in (INDUCTOR, *DEFAULTS):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "home"


def test_compiled_code_is_kept_per_user(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = home.parent / f"mcore_rl_inductor_{os.getuid()}"
    assert find_compile_caches() == {INDUCTOR: str(expected)}
    for folder in (expected, *(home / below for below in DEFAULTS.values())):
        assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv(INDUCTOR, "/mine")
    assert find_compile_caches() == {}


@pytest.mark.parametrize("variable", DEFAULTS)
def test_a_cache_that_others_write_to_is_replaced(
    home: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    find_compile_caches()
    (home / DEFAULTS[variable]).chmod(0o777)
    replaced = find_compile_caches()
    assert set(replaced) == {INDUCTOR, variable}
    folder = Path(replaced[variable])
    assert folder.stat().st_mode & 0o777 == 0o700 and not folder.is_relative_to(home)
    monkeypatch.setenv(variable, "/mine")
    assert set(find_compile_caches()) == {INDUCTOR}


def test_the_caches_lie_where_their_compilers_put_them(home: Path) -> None:
    assert Path(get_default_build_root()).is_relative_to(home / DEFAULTS["TORCH_EXTENSIONS_DIR"])
