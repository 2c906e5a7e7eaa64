"""verl's data, rewards and trainer as options of a recipe."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.config import Config
from mcore_rl.config.tree import leaves_under
from mcore_rl.tools.translate.verl import OVERLONG
from mcore_rl.tools.translate.verl_run import TRACKERS
from tests.tools.translate.accounts import decided, values
from tests.tools.translate.verl_options import translate


def of(**given: Any) -> dict[str, Any]:
    return values(translate(**given))


def test_columns_keep_their_names() -> None:
    found = of(data__prompt_key="question", data__image_key="images", data__reward_fn_key="task")
    columns = {name: value for name, value in found.items() if name.startswith("data.columns.")}
    assert columns == {"data.columns.prompt": "question", "data.columns.data_source": "task"}


def test_epochs_are_steps_where_the_files_are(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": list(range(250))}), file)
    found = of(data__train_files=str(file), data__train_batch_size=100, trainer__total_epochs=3)
    assert found["run.steps"] == 6 and found["data.train"] == [str(file)]
    given = translate(data__train_files=str(file), trainer__total_training_steps=50)
    assert values(given)["run.steps"] == 50
    elsewhere = translate(data__train_files=["/nowhere/train.parquet"])
    assert values(elsewhere)["run.epochs"] == 30.0
    assert "run.steps" not in values(elsewhere)


@pytest.mark.parametrize(
    ("given", "overlong"),
    [
        ({}, "error"),
        ({"data__filter_overlong_prompts": True}, "filter"),
        ({"data__truncation": "left"}, None),
    ],
)
def test_prompts_are_never_cut(given: dict[str, Any], overlong: str | None) -> None:
    translation = translate(**given)
    assert values(translation).get("data.overlong") == overlong
    assert ("data.truncation" in decided(translation)) == (overlong is None)


def test_the_folder_saves_and_trackers() -> None:
    given: dict[str, Any] = {
        "trainer__experiment_name": "first",
        "trainer__project_name": "p",
        "trainer__save_freq": 20,
        "trainer__test_freq": 5,
        "trainer__max_actor_ckpt_to_keep": 3,
        "trainer__resume_mode": "disable",
        "trainer__logger": ["console", "wandb", "swanlab", "clearml", "vemlp_wandb"],
    }
    translation = translate(**given)
    wanted = {
        "run.dir": "runs/first",
        "checkpoint.every_steps": 20,
        "checkpoint.keep": 3,
        "eval.every_steps": 5,
        "run.resume": False,
        "log.wandb_project": "p",
        "log.swanlab_project": "p",
        "log.clearml_project": "p",
        "log.tensorboard": False,
    }
    assert {key: values(translation)[key] for key in wanted} == wanted
    assert "trainer.logger" in decided(translation)
    assert set(TRACKERS.values()) <= set(leaves_under(Config))


def test_the_reward_is_a_function_a_sandbox_or_a_model() -> None:
    own = of(custom_reward_function__path="my.py", custom_reward_function__reward_kwargs__k=2)
    assert own["reward.path"] == "my.py" and own["reward.name"] == "compute_score"
    assert own["reward.kwargs.k"] == 2
    sandbox = of(sandbox_fusion__url="http://10.0.0.7:8080/run_code")
    assert sandbox["reward.path"] == "recipes/rewards/code.py"
    assert sandbox["reward.kwargs.sandbox_url"] == "http://10.0.0.7:8080/run_code"
    model = translate(reward_model__enable=True, reward_model__model__path="org/judge")
    assert values(model)["reward_model.path"] == "org/judge"
    assert "reward_model.enable" in decided(model)
    assert "custom_reward_function.path" in decided(translate())


@pytest.mark.parametrize("group", OVERLONG)
def test_the_penalty_of_long_responses_has_had_three_names(group: str) -> None:
    name = group.replace(".", "__")
    given = {f"{name}__enable": True, f"{name}__len": 4096, f"{name}__penalty_factor": 0.5}
    found = of(**given)
    assert found["reward.overlong_buffer_len"] == 4096 and found["reward.overlong_penalty"] == 0.5
    assert "reward.overlong_penalty" not in of(**{**given, f"{name}__enable": False})
