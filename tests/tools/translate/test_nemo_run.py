"""NeMo-RL's data, rewards and run as options of a recipe."""

from typing import Any

import pytest

from mcore_rl.config.shipped import RECIPES_DIR
from mcore_rl.tools.translate.nemo_rl import NO_END, REWARDS, SETS
from tests.tools.translate.accounts import decided, values
from tests.tools.translate.peer_options import nemo


def of(**given: Any) -> dict[str, Any]:
    return values(nemo(**given))


@pytest.mark.parametrize("name", SETS)
def test_files_are_taken_and_named_sets_are_left_to_the_user(name: str) -> None:
    assert of(**{f"data__{name}__data_path": "/a.jsonl"})[SETS[name]] == ["/a.jsonl"]
    assert f"data.{name}.dataset_name" in decided(nemo(**{f"data__{name}__dataset_name": "x"}))
    assert f"data.{name}" in decided(nemo(**{f"data__{name}": [{"data_path": "/a"}]}))


def test_held_out_answers_are_drawn_as_there() -> None:
    sampled = {"policy__generation__val_temperature": 0.6, "policy__generation__val_top_p": 0.9}
    found = of(**sampled, grpo__val_num_generations_per_prompt=4)
    assert (found["eval.samples"], found["eval.pass_k"]) == (4, 4)
    assert (found["eval.temperature"], found["eval.top_p"]) == (0.6, 0.9)
    assert "eval.samples" not in of(policy__generation__val_temperature=0.0)
    assert "grpo.val_start_at" in decided(nemo(grpo__val_start_at=20))
    assert "policy.generation.val_top_k" in decided(nemo(policy__generation__val_top_k=5))


@pytest.mark.parametrize("name", REWARDS)
def test_rewards_are_files_that_are_shipped(name: str) -> None:
    path = of(data__default__env_name=name)["reward.path"]
    assert (RECIPES_DIR.parent / path).is_file()
    assert "data.default.env_name" in decided(nemo(data__default__env_name="sliding_puzzle"))


def test_the_penalty_of_long_responses() -> None:
    group = "grpo__reward_shaping"
    given = {f"{group}__overlong_buffer_length": 64, f"{group}__overlong_buffer_penalty": 0.5}
    found = of(**given, **{f"{group}__enabled": True})
    assert found["reward.overlong_buffer_len"] == 64 and found["reward.overlong_penalty"] == 0.5
    assert "reward.overlong_penalty" not in of(**given)


def test_a_run_ends_with_its_steps_or_its_epochs() -> None:
    assert of(grpo__max_num_steps=500)["run.steps"] == 500
    endless = nemo(grpo__max_num_steps=NO_END)
    assert "run.steps" not in values(endless) and values(endless)["run.epochs"] == 1.0
    of_no_epoch = of(grpo__max_num_steps=NO_END, grpo__max_num_epochs=-1)
    assert of_no_epoch["run.steps"] == NO_END and "run.epochs" not in of_no_epoch


def test_the_folder_saves_and_trackers() -> None:
    given: dict[str, Any] = {
        "checkpointing__checkpoint_dir": "/runs/a",
        "checkpointing__save_period": 7,
        "checkpointing__keep_top_k": 2,
        "grpo__val_period": -1,
        "logger__wandb_enabled": True,
        "logger__wandb__project": "p",
        "logger__mlflow_enabled": True,
    }
    found = of(**given)
    wanted = {
        "run.dir": "/runs/a",
        "checkpoint.every_steps": 7,
        "checkpoint.keep": 2,
        "eval.every_steps": 0,
        "log.wandb_project": "p",
        "log.mlflow_uri": "http://localhost:5000",
        "log.tensorboard": False,
    }
    assert {key: found[key] for key in wanted} == wanted
    assert "checkpoint.every_steps" not in of(checkpointing__enabled=False)
    assert of(logger__swanlab_enabled=True)["log.swanlab_project"] == "grpo-dev"
