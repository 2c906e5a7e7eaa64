"""Classes of verl's YAML files are loaded by their dotted names."""

import json

import pytest

from mcore_rl.agents.environments.verl_config import check_file, load_class, read_config


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
