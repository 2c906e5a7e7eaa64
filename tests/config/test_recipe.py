"""Recipes: what they compose to, and how a wrong key, type or value is refused."""

from pathlib import Path

import pytest

from mcore_rl.config import Config, ParallelConfig
from mcore_rl.config.recipe import leaves, list_recipes, load_recipe, require


def test_every_shipped_recipe_composes_and_has_a_headline() -> None:
    recipes = list_recipes()
    assert "tiny_moe_grpo" in recipes
    for name, headline in recipes.items():
        assert isinstance(load_recipe(name, []), Config)
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
            r"parallel.tp: Value 'two' of type 'str' could not be converted to Integer",
        ),
        (["model.dtype=fp8"], r"model.dtype='fp8': expected one of 'float32', 'bfloat16'"),
        (["rollout.tp=3", "rollout.ep=2"], r"rollout.ep=2 does not divide rollout.tp=3"),
        (
            ["parallel.ep=4", "parallel.dp=1"],
            r"parallel.ep \* parallel.etp = 4 does not divide tp \* cp \* dp = 1",
        ),
        (
            ["rollout.tp=4", "rollout.nodes_per_engine=3"],
            r"rollout.nodes_per_engine=3 does not divide rollout.tp \* rollout.pp = 4",
        ),
        (
            ["cluster.colocated=true", "rollout.tp=4"],
            r"rollout.engines \* rollout.tp \* rollout.pp = 4: there are parallel.world_size=2"
            r" trainer ranks",
        ),
        (
            ["cluster.colocated=true", "rollout.mode=async"],
            r"cluster.colocated=true with rollout.mode=async: .* set rollout.mode=sync",
        ),
        (["rollout.mode=later"], r"rollout.mode='later': expected one of 'sync'"),
        (
            ["rollout.partial=wait"],
            r"rollout.partial=wait with rollout.mode=sync, which has no use for it",
        ),
        (
            ["rollout.mode=one_step_off", "rollout.max_staleness=2"],
            r"rollout.max_staleness=2 with .*one_step",
        ),
        (
            ["rollout.mode=async", "rollout.oversampling=2.0"],
            r"rollout.oversampling=2.0 with rollout.mode=async",
        ),
        (
            ["rollout.mode=async", "rollout.max_in_flight=4"],
            r"max_in_flight=4: .*samples_per_prompt=8",
        ),
        (
            ["rollout.mode=async", "rollout.deterministic=true"],
            r"deterministic=true: .*use rollout.mode=one_step",
        ),
        (["rollout.mode=async", "rollout.pp=2"], r"rollout.pp=2: .*use rollout.partial=wait"),
        (
            ["rollout.mode=async", "rollout.stale=correct"],
            r"rollout.stale=correct .*correction.weight=token",
        ),
        (
            ["cluster.colocated=true"],
            r"cluster.colocated=true with rollout.stage_weights=True: .* set"
            r" rollout.stage_weights=false",
        ),
        (
            ["cluster.colocated=true", "rollout.stage_weights=false"],
            r"cluster.colocated=true with rollout.restarts=1: .* set rollout.restarts=0",
        ),
        (
            ["judge.path=/a", "judge.url=http://b"],
            r"judge.path=/a with judge.url=http://b: .* leave one empty",
        ),
        (
            ["teacher.path=/a", "teacher.tp=3", "teacher.ep=2"],
            r"teacher.ep=2 does not divide teacher.tp=3",
        ),
        (
            ["reward_model.path=/a", "reward_model.dtype=fp8"],
            r"reward_model.dtype='fp8': expected one of",
        ),
        (
            ["judge.path=/a", "judge.api_key_env=KEY"],
            r"judge.api_key_env=KEY: .* it belongs to judge.url",
        ),
        (
            ["train.router_replay=engine", "drift.routed_experts=false"],
            r"train.router_replay=engine with drift.routed_experts=False: .* set"
            r" drift.routed_experts=true",
        ),
        (
            ["train.freeze_router=true"],
            r"train.router_aux_loss_coef=0.001: a frozen router learns no balance",
        ),
        (["train.router_bias_rate=-1"], r"train.router_bias_rate=-1.0: must be at least 0"),
        (["train.mini_batches=7"], r"is not divisible by train.mini_batches=7"),
        (
            ["algorithm.advantage=gae", "critic.mini_batches=7"],
            r"is not divisible by critic.mini_batches=7",
        ),
        (["critic.gae_lambda=1.5"], r"critic.gae_lambda=1.5: must lie in \[0, 1\]"),
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
        require(Config(), "reward.path")


@pytest.mark.parametrize(
    ("sizes", "dp", "world"),
    [
        ({"ep": 2}, 2, 2),
        ({"ep": 2, "tp": 2}, 1, 2),
        ({"ep": 2, "pp": 2}, 2, 4),
        ({"ep": 2, "cp": 2}, 1, 2),
        ({"ep": 2, "etp": 2}, 4, 4),
        ({"tp": 2, "ep": 4}, 2, 4),
        ({"dp": 3}, 3, 3),
    ],
)
def test_data_parallel_size_is_the_smallest_that_fits_the_experts(
    sizes: dict[str, int], dp: int, world: int
) -> None:
    parallel = ParallelConfig(**sizes)
    assert (parallel.dp_size, parallel.world_size) == (dp, world)


def test_leaves_are_dotted_names_of_options() -> None:
    assert {"run.dir", "train.optimizer.lr", "algorithm.kl.coef", "sft.optimizer.lr"} <= set(
        leaves()
    )
