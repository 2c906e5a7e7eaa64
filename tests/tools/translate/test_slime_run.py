"""slime's data, sampling, rewards and run as options of a recipe."""

from typing import Any

import pytest

from mcore_rl.config.shipped import RECIPES_DIR
from mcore_rl.tools.translate.slime import REWARDS, ROLLOUTS, UNEQUAL_REWARDS
from tests.tools.translate.accounts import decided, values
from tests.tools.translate.peer_options import slime


def of(**given: Any) -> dict[str, Any]:
    return values(slime(**given))


def test_held_out_files_are_pairs_and_may_be_cut() -> None:
    translation = slime(eval_prompt_data=["aime", "/a.jsonl", "gpqa", "/g.jsonl@[0:8]"])
    assert values(translation)["eval.sets"] == [
        {"name": "aime", "path": "/a.jsonl"},
        {"name": "gpqa", "path": "/g.jsonl"},
    ]
    assert "--eval-prompt-data" in decided(translation)
    single = of(eval_prompt_data="/a.jsonl", eval_interval=5)
    assert single["eval.every_steps"] == 5 and single["eval.data"] == ["/a.jsonl"]
    assert of(n_samples_per_eval_prompt=16)["eval.pass_k"] == 16
    own = of(n_samples_per_eval_prompt=16, eval_temperature=0.6, eval_max_response_len=256)
    assert (own["eval.samples"], own["eval.temperature"]) == (16, 0.6)
    assert own["eval.max_response_len"] == 256 and "eval.top_p" not in own


def test_columns_keep_their_names() -> None:
    found = of(input_key="problem", label_key="label", multimodal_keys={"image": "pictures"})
    assert found["data.columns.preset"] == "slime" and found["data.columns.prompt"] == "problem"
    assert found["data.columns.images"] == "pictures" and "data.columns.answer" not in found
    assert of()["data.columns.prompt"] == "input", "slime's default is not the preset's"
    assert of(label_key="answer", metadata_key="m")["data.columns.answer"] == "answer"
    assert "--label-key" in decided(slime())
    given = slime(input_key="a", label_key="b", eval_input_key="a", eval_label_key="c")
    assert "--eval-label-key" in decided(given) and "--eval-input-key" not in decided(given)
    assert "--multimodal-keys" in decided(slime(multimodal_keys={"audio": "sounds"}))


def test_prompts_have_what_the_context_leaves() -> None:
    assert of(rollout_max_prompt_len=100)["data.max_prompt_len"] == 100
    found = of(rollout_max_context_len=1000, rollout_max_response_len=800)
    assert found["data.max_prompt_len"] == 200 and found["rollout.max_response_len"] == 800
    assert "--rollout-max-prompt-len" in decided(slime())


@pytest.mark.parametrize(
    ("program", "path", "mode"),
    [
        ("train.py", None, "sync"),
        ("train_async.py", None, "one_step_off"),
        ("train_async.py", list(ROLLOUTS)[1], "async"),
    ],
)
def test_the_program_says_how_rollouts_and_training_alternate(
    program: str, path: str | None, mode: str
) -> None:
    translation = slime(program, rollout_function_path=path)
    assert values(translation)["rollout.mode"] == mode
    weight = None if mode == "sync" else "none"
    assert values(translation).get("algorithm.correction.weight") == weight
    assert ("correction for stale samples" in decided(translation)) == (mode != "sync")
    corrected = slime(program, rollout_function_path=path, use_tis=True)
    assert values(corrected)["algorithm.correction.weight"] == "token"
    assert "correction for stale samples" not in decided(corrected)
    bypassed = values(slime(program, rollout_function_path=path, use_rollout_logprobs=True))
    assert bypassed["algorithm.correction.bypass"] is True
    assert "algorithm.correction.weight" not in bypassed
    together = slime(program, rollout_function_path=path, colocate=True)
    assert ("--colocate" in decided(together)) == (mode != "sync")


def test_functions_of_the_users_own_are_left_to_the_user() -> None:
    for name in ("rollout_function_path", "custom_rm_path", "custom_generate_function_path"):
        assert f"--{name.replace('_', '-')}" in decided(slime(**{name: "mine.py"}))


@pytest.mark.parametrize("kind", REWARDS)
def test_rewards_are_files_that_are_shipped(kind: str) -> None:
    path = of(rm_type=f"boxed_{kind}")["reward.path"]
    assert path == of(rm_type=kind)["reward.path"]
    assert (RECIPES_DIR.parent / path).is_file()
    assert "--rm-type" in decided(slime(rm_type="f1"))


def test_groups_of_equal_rewards_are_passed_over() -> None:
    given = {"over_sampling_batch_size": 64, "rollout_batch_size": 32}
    found = of(**given, dynamic_sampling_filter_path=UNEQUAL_REWARDS[0])
    assert found["rollout.dynamic_sampling"] and found["rollout.oversampling"] == 2
    assert "--over-sampling-batch-size" in decided(slime(**given))
    assert "--dynamic-sampling-filter-path" in decided(slime(dynamic_sampling_filter_path="x.y"))


def test_the_folder_saves_steps_and_trackers() -> None:
    given: dict[str, Any] = {"save": "/runs/a/", "save_interval": 20, "num_rollout": 300}
    translation = slime(**given, use_wandb=True, wandb_project="p", seed=7)
    wanted = {
        "run.dir": "/runs/a",
        "checkpoint.every_steps": 20,
        "run.steps": 300,
        "run.seed": 7,
        "log.wandb_project": "p",
        "log.tensorboard": False,
    }
    assert {key: values(translation)[key] for key in wanted} == wanted
    assert values(slime(num_epoch=3))["run.epochs"] == 3.0
    assert of(profile=True, profile_step_start=2, profile_step_end=4)["profile.steps"] == [2, 3]
    assert of(distributed_timeout_minutes=3)["run.call_timeout_s"] == 180
