"""Names of classes in modules and files, and errors that say what is missing."""

import json

import pytest

from mcore_rl.agents.environments.adapters import load_named


def test_modules_and_files_are_loaded(tmp_path):
    (tmp_path / "neighbor_of_loaded.py").write_text("VALUE = 7\n")
    file = tmp_path / "loaded.py"
    file.write_text("from neighbor_of_loaded import VALUE\nclass Inside: value = VALUE\n")
    assert load_named("json:loads") is json.loads
    loaded = load_named(f"{file}:Inside")
    assert loaded.value == 7
    assert load_named(f"{file}:Inside") is loaded


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gym", "'gym' names nothing: write module:name or folder/file.py:name"),
        ("json:nothing", "json has no 'nothing'"),
        ("no_such_package.part:x", "finds no module 'no_such_package.part'"),
        ("nowhere/tools.py:x", "there is no file .*nowhere/tools.py"),
    ],
)
def test_what_is_not_there_is_named(name, text):
    with pytest.raises(ValueError, match=text):
        load_named(name)


def test_errors_of_the_file_itself_pass_through_each_time(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import no_such_package_either\n")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_package_either"):
            load_named(f"{file}:x")
