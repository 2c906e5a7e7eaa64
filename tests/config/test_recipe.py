"""Recipes: what they compose to, and how a wrong key, type or value is refused."""

from pathlib import Path

import pytest

from mcore_rl.checks.algorithm import check_algorithm
from mcore_rl.config import Config
from mcore_rl.config.recipe import check_texts, leaves, list_recipes, load_recipe, require
from mcore_rl.config.shipped import HOME, RECIPES_DIR, resolve_shipped

MODEL = "recipes/model/deepseek_v3"


def test_every_shipped_recipe_composes_has_a_headline_and_what_its_algorithm_needs() -> None:
    recipes = list_recipes()
    assert "tiny_moe_grpo" in recipes
    for name, headline in recipes.items():
        config = load_recipe(name, [])
        assert isinstance(config, Config)
        if name != "tiny_moe_distillation":  # whose teacher a user names
            check_algorithm(config)
        assert headline, f"{name}.yaml should begin with a comment that says what it is"


def test_overrides_reach_the_tree() -> None:
    config = load_recipe(
        "tiny_moe_grpo",
        ["parallel.pp=2", "train.optimizer.lr=3e-4", "data.train=[a.jsonl,b.jsonl]"],
    )
    assert config.parallel.pp == 2
    assert config.train.optimizer.lr == 3e-4
    assert config.data.train == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.tq=2"], r"unknown key 'parallel.tq'. Did you mean 'parallel.tp'"),
        (["tp=2"], r"unknown key 'tp'. Did you mean 'parallel.tp'"),
        (["rollot.tp=2"], r"unknown key 'rollot'. Did you mean 'rollout'"),
        (["+extra=1"], r"unknown key 'extra'"),
        (
            ["parallel.tp=two"],
            r"parallel.tp: Value 'two' of type 'str' could not be converted to Integer: give a"
            r" whole number in digits",
        ),
        (["model.dtype=fp8"], r"model.dtype='fp8': expected one of 'float32', 'bfloat16'"),
        (
            ["rollout.tp=3", "rollout.ep=2"],
            r"recipe tiny_moe_grpo: rollout.ep=2 does not divide rollout.tp=3",
        ),
        (
            ["train.freeze_router=true"],
            r"train.router_aux_loss_coef=0.001: a frozen router learns no balance",
        ),
        (["run.steps"], r"overrides have the form key=value"),
    ],
)
def test_wrong_overrides_are_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("tiny_moe_grpo", overrides)


def test_unknown_key_inside_a_recipe_file_is_refused(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("# mine\ndefaults: [schema, _self_]\nrollout:\n  temprature: 0.5\n")
    with pytest.raises(
        ValueError, match=r"unknown key 'rollout.temprature'. Did you mean 'rollout.temperature'"
    ):
        load_recipe(str(path), [])


def test_a_recipe_of_ones_own_changes_a_shipped_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [qwen3_30b_a3b_grpo_8, _self_]\nrollout: {max_response_len: 4096}\n")
    config = load_recipe(str(path), ["algorithm=dapo"])
    assert config.rollout.max_response_len == 4096
    assert config.parallel.ep == 8
    assert config.rollout.dynamic_sampling


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'tiny_moe_grpo'"):
        load_recipe("tiny_moe_grp", [])


def test_require_names_the_missing_key() -> None:
    with pytest.raises(ValueError, match=r"reward.path is not set.*reward.path=<value>"):
        require({"model.path": "model", "reward.path": ""})


def test_leaves_are_dotted_names_of_options() -> None:
    assert {"run.dir", "train.optimizer.lr", "algorithm.kl.coef", "sft.optimizer.lr"} <= set(
        leaves()
    )


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(f"# mine\ndefaults: [tiny_moe_grpo, _self_]\n{text}\n")
    return path


@pytest.mark.parametrize("text", ["1e5", "true", "off", "007", "1.10", "0x10", "1_000", "12:30"])
def test_a_text_that_yaml_changes_is_refused_with_the_quoted_form(
    tmp_path: Path, text: str
) -> None:
    path = write(tmp_path, f"run:\n  dir: {text}")
    with pytest.raises(ValueError, match=rf'run.dir: YAML reads {text} as .*: dir: "{text}"$'):
        load_recipe(str(path), [])
    quoted = write(tmp_path, f'run:\n  dir: "{text}"')
    assert load_recipe(str(quoted), []).run.dir == text


@pytest.mark.parametrize("text", ["7", "1.5", "2026-01-01", "é (copy)", "a=b", "-1"])
def test_what_yaml_does_not_change_is_taken(tmp_path: Path, text: str) -> None:
    assert load_recipe(str(write(tmp_path, f"run: {{dir: {text}}}")), []).run.dir == text


def test_elements_of_lists_are_checked_and_numbers_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.train: YAML reads 1e5 as 100000.0"):
        check_texts(write(tmp_path, "data: {train: [a.jsonl, 1e5]}"), Config)
    check_texts(write(tmp_path, "run: {steps: 0x10}\ntrain: {optimizer: {lr: 1e-3}}"), Config)
    check_texts(write(tmp_path, "log: {wandb_project: null}"), Config)


def test_shipped_recipes_need_no_quotes() -> None:
    for path in RECIPES_DIR.glob("*.yaml"):
        check_texts(path, Config)


def test_the_recipes_are_there() -> None:
    assert (RECIPES_DIR / "tiny_moe_grpo.yaml").is_file()


def test_a_shipped_path_leads_to_the_package_unless_there_is_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_shipped(MODEL) == str(HOME / MODEL)
    (tmp_path / MODEL).mkdir(parents=True)
    assert resolve_shipped(MODEL) == MODEL


@pytest.mark.parametrize("path", ["", "/models/a", "Qwen/Qwen3-30B-A3B", "recipes/model/nowhere"])
def test_other_paths_stay_as_they_are(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_shipped(path) == path
