"""Texts on the command line reach the tree as they were typed, whatever Hydra's grammar says."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.config import Config
from mcore_rl.config.overrides import to_hydra
from mcore_rl.config.recipe import load_recipe

# Interpolations are OmegaConf's, quotes at both ends are the user's own.
texts = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), min_size=1, max_size=20)
as_typed = texts.filter(lambda t: "$" not in t and t[0] not in "'\"~" and t.strip() == t)


@pytest.mark.parametrize(
    "text",
    ["1e5", "true", "é", "a#b", "step=10", "(copy)", "a,b", "a b", "it's", "a\\b", "{a}", "[a]"],
)
def test_a_path_stays_as_it_was_typed(text: str) -> None:
    assert load_recipe("tiny_moe_grpo", [f"run.dir={text}"]).run.dir == text


@given(as_typed.filter(lambda text: text != "null"))
def test_any_text_stays_as_it_was_typed(text: str) -> None:
    override = OverridesParser.create().parse_override(to_hydra(f"run.dir={text}", Config))
    assert override.value() == text


def test_quotes_interpolations_and_the_home_folder_are_read(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    for typed, expected in {
        "'a b'": "a b",
        '"1e5"': "1e5",
        "${oc.env:HOME}/x y": "/home/ada/x y",
        "~/runs/é": "/home/ada/runs/é",
    }.items():
        assert load_recipe("tiny_moe_grpo", [f"run.dir={typed}"]).run.dir == expected


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("[é.jsonl, a b.jsonl]", ["é.jsonl", "a b.jsonl"]),
        ("a=1.jsonl", ["a=1.jsonl"]),
        ("['a,b.jsonl',\"c\"]", ["a,b.jsonl", "c"]),
        ("[]", []),
    ],
)
def test_lists_of_texts_are_read(typed: str, expected: list[str]) -> None:
    assert load_recipe("tiny_moe_grpo", [f"data.train={typed}"]).data.train == expected


def test_null_unsets_and_is_no_text() -> None:
    assert load_recipe("tiny_moe_grpo", ["log.wandb_project=null"]).log.wandb_project is None
    with pytest.raises(ValueError, match=r"field 'run.dir' is not Optional"):
        load_recipe("tiny_moe_grpo", ["run.dir=null"])


def test_a_mapping_with_free_names_is_given_whole_or_by_name() -> None:
    for overrides in (
        ["train.megatron={deterministic_mode: true}"],
        ["train.megatron.deterministic_mode=true"],
        ["++train.megatron.deterministic_mode=true"],
    ):
        config = load_recipe("tiny_moe_grpo", overrides)
        assert config.train.megatron == {"deterministic_mode": True}


def test_numbers_and_groups_are_left_to_hydra() -> None:
    for override in ("run.steps=1e1", "train.share_prefixes=true", "cluster=gpu", "+cluster=gpu"):
        assert to_hydra(override, Config) == override


def test_what_hydra_cannot_read_is_told_with_the_quoted_form() -> None:
    with pytest.raises(ValueError, match=r"texts in lists and mappings may be quoted, as in"):
        load_recipe("tiny_moe_grpo", ["data.train=[a'b,c"])


@pytest.mark.parametrize("override", ["data.train=a,b.jsonl", "run.seed=1,2"])
def test_several_values_without_brackets_are_told_with_both_forms(override: str) -> None:
    with pytest.raises(ValueError, match=rf"{override}': .* key=\[a,b\], .* key='a,b'"):
        load_recipe("tiny_moe_grpo", [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run:\n\tsteps: 1\n", r"no YAML that is read here: .*cannot start any token"),
        ("run: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
    ],
)
def test_a_recipe_that_is_no_plain_yaml_is_one_message(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"# mine\ndefaults: [schema, _self_]\n{text}")
    with pytest.raises(ValueError, match=f"(?s)recipe .*mine.yaml: .*{message}"):
        load_recipe(str(path), [])


def test_a_recipe_lies_in_any_folder(tmp_path: Path) -> None:
    folder = tmp_path / "é (copy), a=b"
    folder.mkdir()
    path = folder / "mine.yaml"
    path.write_text("# mine\ndefaults: [tiny_moe_grpo, _self_]\nrun: {steps: 3}\n")
    assert load_recipe(str(path), []).run.steps == 3
