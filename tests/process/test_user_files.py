"""Users' files are modules that any process finds again by their names."""

import multiprocessing
import os
import pickle
import sys
from pathlib import Path

import pytest

from mcore_rl.process.user_files import import_file, name_module

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass, fields
import typing
@dataclass
class Pair:
    first: int
    other: Pair | None = None
def add(pair):
    return Pair(pair.first + 1)
KINDS = typing.get_type_hints(Pair)
"""


@pytest.fixture(params=["mine.py", "with-dash and space.py", "\u00e9t\u00e9_2f.py", "random.py"])
def file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    file = tmp_path / request.param
    file.write_text(SOURCE)
    return file


def test_a_file_is_imported_once_and_is_in_sys_modules(file: Path) -> None:
    module = import_file(file)
    assert import_file(Path(os.path.relpath(file))) is module
    assert sys.modules[module.__name__] is module
    assert module.__file__ == str(file)
    assert module.KINDS["first"] is int
    assert pickle.loads(pickle.dumps(module.Pair(7))) == module.Pair(7)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_functions_and_objects_travel_to_other_processes(tmp_path: Path, method: str) -> None:
    file = tmp_path / "random.py"  # does not shadow the module of this name
    file.write_text(SOURCE)
    module = import_file(file)
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.map(module.add, [module.Pair(1)]) == [module.Pair(2)]


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    modules = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"NAME = {name!r}\n")
        modules.append(import_file(tmp_path / name / "mine.py"))
    assert [module.NAME for module in modules] == ["a", "b"]


def test_a_file_that_fails_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text("import no_such_module_at_all\n")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
            import_file(file)
    assert name_module(file) not in sys.modules


def test_a_folder_of_bytes_that_are_no_text(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    file = Path(os.fsdecode(folder)) / "mine.py"
    file.write_text("NAME = 1\n")
    assert import_file(file).NAME == 1
