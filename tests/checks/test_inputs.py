"""A command whose inputs are not there is refused before anything heavy is imported."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.checks.inputs import (
    HERE,
    RunPlace,
    check_algorithm_names,
    check_planned,
    check_run_dir,
    find_missing,
    list_input_checks,
    refuse_missing,
)
from mcore_rl.config import AlgorithmConfig
from mcore_rl.config.recipe import load_recipe
from mcore_rl.config.shipped import RECIPES_DIR
from tests.support.stub_inputs import STUB_ROW

MODEL = str(RECIPES_DIR / "model" / "qwen3_30b_a3b")
FUNCTION = "def reward(data_source, solution_str, ground_truth, extra_info): ...\n"


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """Return overrides with which all that `train` reads is there."""
    (tmp_path / "train.jsonl").write_text(STUB_ROW)
    (tmp_path / "reward.py").write_text(FUNCTION)
    return [
        f"run.dir={tmp_path}/run",
        f"model.path={MODEL}",
        "model.init=random",
        f"data.train={tmp_path}/train.jsonl",
        "eval.data=[]",
        f"reward.path={tmp_path}/reward.py",
    ]


def check(overrides: Sequence[str], command: str = "train", recipe: str = "tiny_moe_grpo") -> None:
    refuse_missing(list_input_checks(load_recipe(recipe, list(overrides)), command))


def find(overrides: Sequence[str]) -> list[str]:
    return find_missing(list_input_checks(load_recipe("tiny_moe_grpo", list(overrides)), "train"))


def test_a_run_whose_inputs_are_there_is_not_refused(given: list[str]) -> None:
    check(given)
    assert find(given) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.dir=''", "^run.dir is not set"),
        ("model.init=hf", r"^model.path=.* holds config.json alone: set model.path to the folder"),
        ("model.path=/no/model", "^model.path=/no/model: /no/model/config.json does not exist"),
        ("model.path=data/code/model", "`mcore-rl data code` makes it$"),
        ("data.train=[]", "^data.train is not set"),
        ("data.train=no.jsonl", "^data.train: data file no.jsonl does not exist"),
        ("data.train=data/zoom/x.parquet", "does not exist; `mcore-rl data zoom` makes it$"),
        ("eval.data=no.jsonl", "^eval.data: data file no.jsonl does not exist"),
        (
            "eval.sets=[{name: a, path: no.jsonl}]",
            r"^eval.sets\[0\].path: data file no.jsonl does not exist",
        ),
        ("algorithm.loss=gsp", r"^algorithm.loss='gsp' \(did you mean 'gspo'\?\): expected one of"),
        ("algorithm.advantage=x", "^algorithm.advantage='x': expected one of"),
        ("algorithm.path=no.py", "^algorithm.path=no.py: no such file in "),
        ("reward.path=no.py", "^reward.path=no.py: no such file in "),
        ("reward.path=recipes/rewards/gsm9k.py", "; did you mean recipes/rewards/gsm8k.py\\?$"),
        (
            "reward.name=rewards",
            r"reward.name=rewards: .* has no 'rewards'; it has reward: name one of them$",
        ),
        ("reward.kwargs={limit: 3}", "must take the keyword arguments data_source, .*: limit$"),
    ],
)
def test_an_input_that_is_not_there_is_named(given: list[str], override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check([*given, override])
    assert len(find([*given, override])) == 1


def test_a_critic_that_is_not_there_is_named(given: list[str]) -> None:
    critic = ["algorithm.advantage=gae", "critic.path=/no/critic"]
    with pytest.raises(ValueError, match=r"^critic.path=/no/critic: /no/critic/config.json does"):
        check([*given, *critic])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def reward(:\n", r"reward.py line 1 is not Python: .*; mend it"),
        (
            "def other(): ...\nclass Judge: ...\n",
            "has no 'reward'; it has other, Judge: name one of them$",
        ),
        ("def reward(text): ...\n", "reward, line 1, must take the keyword arguments"),
        ("", "it has none$"),
        ("from no_such_package.a import reward\n", "reward.py imports no_such_package, which"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused(
    given: list[str], tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "reward.py").write_text(source)
    with pytest.raises(ValueError, match=message):
        check(given)


@pytest.mark.parametrize(
    "source",
    [
        "def reward(**fields): ...\n",
        "async def reward(*, data_source, solution_str, ground_truth, extra_info=None): ...\n",
        "def reward(data_sources, solution_strs, ground_truths, extra_infos, more=1): ...\n",
        "@wrap\ndef reward(text): ...\n",
        "from json import loads as reward\n",
        "from json import *\n",
        "try:\n    import fast\nexcept ImportError:\n    reward = slow\n",
        "reward = partial(score, limit=3)\n",
    ],
)
def test_a_reward_that_may_be_right_is_left_to_the_run(
    given: list[str], tmp_path: Path, source: str
) -> None:
    (tmp_path / "reward.py").write_text(source)
    check(given)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("agents.environment=tool", "^agents.environment=tool: there is no environment of kind"),
        ("agents.options.turns=3", "^agents.environment=tools: .* does not read the options turns"),
        (
            "agents.options.reward=no.py:f",
            r"there is no file .*/no.py, which 'no.py:f' names",
        ),
        ("agents.options.reward=recipes/tools/calculator.py:f", "calculator.py has no 'f'; it has"),
        ("agents.environment=mine.py:World", r"there is no file .*/mine.py, which 'mine.py:World'"),
    ],
)
def test_an_environment_that_is_not_there_is_named(
    given: list[str], override: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check([*given, "reward.path=''", override], recipe="tiny_agent_calculator")


@pytest.mark.parametrize("recipe", ["tiny_agent_calculator", "qwen3_30b_a3b_code_16"])
def test_files_of_shipped_recipes_are_found_from_any_folder(
    given: list[str], recipe: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    *inputs, reward = given
    assert reward.startswith("reward.path=")
    check(inputs, recipe=recipe)


def test_a_package_of_an_environment_is_looked_for(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*given, "reward.path=''", "agents.python=''"]
    monkeypatch.setitem(sys.modules, "gymnasium", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"needs gymnasium, .* pip install gymnasium, or name"):
        check(overrides, recipe="tiny_agent_cartpole")
    check([*overrides, "agents.python=/other/python"], recipe="tiny_agent_cartpole")


def test_a_package_of_a_tracker_is_looked_for(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*given, "log.wandb_project=mine"]
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text("")
    check(overrides)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"^log.wandb_project='mine' needs the package wandb: pip"):
        check(overrides)
    check(overrides, "pairs")  # logs no metrics


def test_engines_need_sglang_unless_they_run_elsewhere(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)  # as if it were not installed
    message = r"^the engines need SGLang, .* pip install .* '\.\[gpu\]' .*, make venv without a GPU"
    for command in ("train", "pairs"):
        with pytest.raises(ValueError, match=message):
            check(given, command)
    check([*given, "cluster.address=10.0.0.1:6379"])
    config = load_recipe("tiny_moe_grpo", given)
    check_planned(config.algorithm, config.model.path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("alarms.when=['kl/reff > 1']", "no metric is called kl/reff; did you mean kl/ref"),
        ("alarms.webhook=hooks.example.com/T0", "alarms.webhook is no URL: give one"),
        ("alarms.command=[no_such_program]", "there is no program no_such_program; give its path"),
    ],
)
def test_an_alarm_that_could_not_be_told_is_refused(
    given: list[str], override: str, message: str
) -> None:
    check([*given, "alarms.when=['router/layer_3/idle_share > 0.5']", "alarms.command=[cat]"])
    with pytest.raises(ValueError, match=re.escape(message)):
        check([*given, override])


def test_each_command_asks_for_what_it_reads(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the repository may hold data/arithmetic
    with pytest.raises(ValueError, match=r"^sft.data: data file data/arithmetic/sft.parquet"):
        check(given, "sft")
    with pytest.raises(ValueError, match=r"^eval.data is not set"):
        check(given, "eval")
    source = "data.sources=[{path: no.jsonl}]"
    with pytest.raises(ValueError, match=r"^data.sources\[0\].path: data file no.jsonl"):
        check([*given, "data.train=[]", source])
    check([*given, "data.train=[hf://datasets/me/math/train.parquet]", "model.path=me/model"])


def test_a_search_needs_its_index(given: list[str], tmp_path: Path) -> None:
    overrides = [*given, "reward.path=''"]
    with pytest.raises(ValueError, match=r"^search.index=\S+: there is no such folder"):
        check([*overrides, "search.index=/no/index"], recipe="tiny_agent_search")
    check([*overrides, f"search.index={tmp_path}"], recipe="tiny_agent_search")
    elsewhere = ["search.index=/no/index", "cluster.address=auto"]
    check([*overrides, *elsewhere], recipe="tiny_agent_search")


def test_a_judge_needs_its_question(given: list[str]) -> None:
    judged = [*given, "judge.url=http://judge", "reward.parts=[judge]", "reward.weights=[1]"]
    check(judged)
    with pytest.raises(ValueError, match=r"^reward.judge.template=no.jinja: no such file"):
        check([*judged, "reward.judge.template=no.jinja"])


def test_a_plan_needs_names_and_a_config_alone(tmp_path: Path) -> None:
    recipe = load_recipe("qwen3_30b_a3b_grpo_8", [])
    for path in (recipe.model.path, "me/model"):
        check_planned(recipe.algorithm, path)
    with pytest.raises(ValueError, match=r"^model.path=.*config.json does not exist"):
        check_planned(recipe.algorithm, str(tmp_path))


def test_files_are_looked_for_where_the_run_has_them(given: list[str], tmp_path: Path) -> None:
    asked: dict[str, str] = {}

    def look(option: str, path: str) -> Path | None:
        asked[option] = path
        return None  # they cannot be seen from here

    overrides = [*given, "data.train=/mnt/a.jsonl", "reward.path=/mnt/r.py", "log.wandb_project=x"]
    place = RunPlace(look, is_here=False)
    refuse_missing(list_input_checks(load_recipe("tiny_moe_grpo", overrides), "train", place))
    assert asked == {
        "model.path": MODEL,
        "data.train": "/mnt/a.jsonl",
        "reward.path": "/mnt/r.py",
    }


def test_known_algorithms_are_those_that_are_registered() -> None:
    from mcore_rl.algo.lookup import advantages, losses

    for option, registry in (("advantage", advantages), ("loss", losses)):
        for name in registry.names:
            chosen: dict[str, Any] = {option: name}
            check_algorithm_names(AlgorithmConfig(**chosen))
        with pytest.raises(ValueError) as error:
            overrides = [f"algorithm.{option}=none of them"]
            check_algorithm_names(load_recipe("tiny_moe_grpo", overrides).algorithm)
        assert str(error.value).count("'") == 2 * (1 + len(registry.names))
    assert HERE.is_here


def test_a_run_folder_must_be_one_that_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_run_dir(str(tmp_path / "new" / "run"))
    monkeypatch.chdir(tmp_path)
    check_run_dir("relative/run")
    (tmp_path / "file").write_text("")
    for run_dir in ("file", "file/run"):
        with pytest.raises(ValueError, match=rf"run.dir={run_dir}: .*/file is not a folder"):
            check_run_dir(run_dir)
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_run_folder_must_be_writable(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(
        ValueError, match=r"run.dir=.*: no permission for user .* to write to .*/closed"
    ):
        check_run_dir(str(tmp_path / "closed" / "run"))
