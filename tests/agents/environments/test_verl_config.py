"""Classes of verl's YAML files are loaded by their dotted names."""

import json

import pytest

from mcore_rl.agents.environments.verl_env import (
    check_classes,
    check_file,
    load_class,
    read_config,
)


def test_entries_and_classes(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("tools: [{class_name: json.JSONDecoder}]\nother: 1")
    (entry,) = read_config(str(path), "tools")
    assert load_class(entry["class_name"]) is json.JSONDecoder


@pytest.mark.parametrize("text", ["", "tools: {}", "tools: [{}]", "interaction: []"])
def test_a_file_without_them_is_named(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"c.yaml has no list 'tools'"):
        read_config(str(path), "tools")
    with pytest.raises(ValueError, match="there is no such file"):
        check_file(str(path.with_name("d.yaml")))


def test_a_file_that_is_no_yaml_is_named(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("tools: [")
    with pytest.raises(ValueError, match=r"config is '.*c.yaml', which is no YAML: "):
        read_config(str(path), "tools")


@pytest.mark.parametrize(
    ("class_name", "message"),
    [
        ("no_such_package.Tool", "finds no module 'no_such_package'.*: install it there"),
        ("json.Nothing", "json has no 'Nothing'"),
        ("Tool", "':Tool' names nothing"),
        ("a_broken_tool.Tool", r"ZeroDivisionError: .*, at \S*a_broken_tool.py line 1; mend it"),
        ("a_tool_that_exits.Tool", "the code tried to end the process with status None, at "),
    ],
)
def test_a_class_that_cannot_be_imported_is_named(tmp_path, monkeypatch, class_name, message):
    (tmp_path / "a_broken_tool.py").write_text("1 / 0\n")
    (tmp_path / "a_tool_that_exits.py").write_text("import sys\nsys.exit()\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "c.yaml"
    path.write_text(f"tools: [{{class_name: json.JSONDecoder}}, {{class_name: {class_name}}}]")
    wanted = f"config is '.*c.yaml', with class_name {class_name}: .*{message}"
    with pytest.raises(ValueError, match=wanted):
        check_classes(str(path), "tools")
