"""Options of another system are read from files, overrides and whole command lines."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mcore_rl.tools.translate.hydra import flatten, load_tree, parse_overrides, read_options


def test_a_configuration_is_resolved_and_overrides_win(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("a: {b: 1, c: '${a.b}', name: '???', empty: {}}\nlist: [1, 2]\n")
    options = read_options([str(file), "a.b=3", "+new.x=[y,z]", "~list"])
    assert options.is_whole
    wanted = {"a.b": 3, "a.c": 1, "a.name": None, "a.empty": {}, "list": None, "new.x": ["y", "z"]}
    assert options.given == wanted


def test_hydras_file_of_overrides_is_read(tmp_path: Path) -> None:
    file = tmp_path / "overrides.yaml"
    file.write_text("- a.b=2\n- '++c={d: 1e-6}'\n")
    options = read_options([str(file)])
    assert not options.is_whole
    assert options.given == {"a.b": 2, "c.d": 1e-6}


def test_the_rest_of_a_command_line_is_passed_over() -> None:
    line = ["-m", "verl.trainer.main_ppo", "--config-path=./config", "--config-name=x.yaml", "a=b"]
    assert read_options(line).given == {"a": "b"}
    assert read_options(line).config_name == "x.yaml"
    assert read_options(["--config-name", "y", "a=b"]).config_name == "y"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("missing.yaml", "missing.yaml: there is no such file"),
        ("a=[", r"a=\[: neither a YAML file nor an override key=value"),
        ("--own-flag", "--own-flag: neither a YAML file nor an override"),
        ("words", "words: neither a YAML file nor an override"),
    ],
)
def test_what_cannot_be_read_is_named(argument: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_options([argument])


def test_a_file_that_is_no_configuration_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for text in ("a: ${nothing}\n", "a: [\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"run.yaml: no configuration in YAML"):
            read_options([str(file)])


def test_a_tree_keeps_what_is_to_be_computed(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("a: ${b}\nb: 1\n")
    tree = load_tree(file)
    assert OmegaConf.to_container(tree) == {"a": "${b}", "b": 1}
    with pytest.raises(ValueError, match=r"no.yaml: there is no such file, which x names"):
        load_tree(tmp_path / "no.yaml", ", which x names")


def test_nested_options_get_dotted_names() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": {}}}) == {"a.b.c": 1, "a.d": {}}
    assert parse_overrides(["a={b: {c: 1}}"]) == {"a.b.c": 1}
