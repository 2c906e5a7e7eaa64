"""C code is compiled once for a machine, and left out where no compiler is."""

import ctypes
import shutil
from pathlib import Path

import pytest

from mcore_rl.device.native import find_compiler, library_dir, load, openmp_flags

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache" / "mcore_rl" / "native"


def make_compiler(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo one && exit\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("name", ["changes", "checked_copy", "forward", "low_rank", "sampling"])
def test_the_library_is_compiled_once(name: str, cache: Path, monkeypatch, tmp_path) -> None:
    calls = tmp_path / "calls"
    compiler = make_compiler(tmp_path / "compiler", f'echo call >> {calls}\nexec cc "$@"')
    monkeypatch.setenv("CC", compiler)
    assert isinstance(load(name), ctypes.CDLL)
    assert isinstance(load(name), ctypes.CDLL)
    assert calls.read_text() == "call\n"
    assert [file.suffix for file in cache.iterdir()] == [".so"], "parts are left over"


def test_another_compiler_makes_another_library(cache: Path, monkeypatch, tmp_path) -> None:
    load("sampling")
    monkeypatch.setenv("CC", make_compiler(tmp_path / "compiler", 'exec cc "$@"'))
    load("sampling")
    assert len(list(cache.iterdir())) == 2


def test_there_is_no_library_without_a_compiler(cache: Path, monkeypatch) -> None:
    monkeypatch.setenv("CC", "none")
    assert find_compiler() is None
    assert load("forward") is None
    assert not cache.exists()


def test_loops_run_on_threads_if_gcc_compiles_them(cache: Path, monkeypatch, tmp_path) -> None:
    alone = make_compiler(tmp_path / "compiler", 'exec cc "$@"')  # says "one" of itself
    monkeypatch.setenv("CC", alone)
    compiled = load("layers")
    assert compiled is not None and compiled.is_parallel() == 0
    assert openmp_flags("clang version 19.1.7") == ()
    flags = openmp_flags("cc (Debian 14.2.0) 14.2.0\nCopyright (C) 2024 Free Software Foundation")
    assert flags[0] == "-fopenmp" and Path(flags[-1]).parent.parent.name == "torch"


def test_the_compilers_options_are_kept(cache: Path, monkeypatch) -> None:
    monkeypatch.setenv("CC", "cc -g0")
    assert find_compiler() == [shutil.which("cc"), "-g0"]


def test_a_compiler_that_fails_is_quoted(cache: Path, monkeypatch, tmp_path) -> None:
    compiler = make_compiler(tmp_path / "compiler", "echo no such processor >&2; exit 4")
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(RuntimeError, match=r"exited 4; CC=none does without:\nno such processor"):
        load("forward")
    assert not list(cache.iterdir())


def test_a_cache_that_others_write_to_is_replaced(cache: Path) -> None:
    assert library_dir() == cache and cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o770)
    folder = library_dir()
    assert folder != cache and folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()


def test_a_cache_that_cannot_be_written_is_replaced(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = library_dir()
    assert folder.is_dir() and not folder.is_relative_to(tmp_path / "file")
    assert folder.stat().st_mode & 0o077 == 0, "another user could replace a library"
    folder.rmdir()
