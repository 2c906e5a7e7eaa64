"""The GPUs of a recipe: how many, on how many hosts, and within a budget that completes dp."""

from pathlib import Path

import pytest

from mcore_rl.config import Config
from mcore_rl.config.recipe import find_base, load_recipe
from mcore_rl.config.tree import with_settings
from mcore_rl.planning.bundles import RunSize
from mcore_rl.planning.gpus import check_budget, find_gpus
from mcore_rl.planning.verdict import judge_recipe, refuse_too_large

QWEN = "qwen3_30b_a3b_grpo_32"


def load(*overrides: str, recipe: str = QWEN) -> Config:
    return load_recipe(recipe, list(overrides))


def count_gpus(config: Config) -> int:
    return RunSize.make(config, "train").count_all_gpus()


def check(config: Config, command: str = "train") -> None:
    check_budget(RunSize.make(config, command), config.cluster.gpus, config.parallel.dp)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "GPUs: 32 on 4 hosts"),
        (["parallel.tp=4"], "GPUs: 48 on 6 hosts (the recipe it starts from: 32)"),
        (["rollout.engines=1", "~parallel.dp", "parallel.ep=1"], "GPUs: 6 on 1 host (the recipe"),
        (["cluster.gpus=40"], "GPUs: 32 on 4 hosts (cluster.gpus allows 40)"),
        (
            ["~parallel.dp", "cluster.gpus=48"],
            "GPUs: 48 on 6 hosts (the recipe it starts from: 32)",
        ),
    ],
)
def test_the_line_about_gpus(overrides: list[str], line: str) -> None:
    config = load(*overrides)
    size = RunSize.make(config, "train")
    gpus = find_gpus(size, config.rollout, config.cluster, 8, count_gpus(load()))
    assert gpus.explain().startswith(line)


@pytest.mark.parametrize(
    ("recipe", "overrides", "dp"),
    [
        (QWEN, ["parallel.tp=4", "cluster.gpus=32"], 4),
        (QWEN, ["cluster.gpus=32"], 8),
        (QWEN, ["cluster.gpus=39"], 8),  # 11 would leave experts without a whole group
        (QWEN, ["cluster.gpus=32", "parallel.pp=2"], 4),
        (QWEN, ["cluster.gpus=32", "rollout.engines=2"], 12),
        ("qwen3_30b_a3b_grpo_8", ["cluster.gpus=32"], 4),  # engines on the same GPUs
        ("tiny_moe_grpo", ["cluster.gpus=9"], 8),
        ("tiny_moe_ppo", ["cluster.gpus=9", "critic.parallel.dp=4", "parallel.ep=1"], 4),
    ],
)
def test_a_budget_completes_the_data_parallel_size(
    recipe: str, overrides: list[str], dp: int
) -> None:
    taken_out = ["~parallel.dp"] if load(recipe=recipe).parallel.dp else []
    config = load(*taken_out, *overrides, recipe=recipe)
    assert config.parallel.dp == dp
    check(config)


def test_a_budget_that_is_too_small_names_who_takes_it() -> None:
    with pytest.raises(
        ValueError, match=r"32 GPUs: 16 by parallel \+ 16 by rollout.engines. .*=8 "
    ):
        check(load("cluster.gpus=31"))
    check(load("cluster.gpus=16"), "sft")
    check(load("cluster.gpus=16"), "eval")
    with pytest.raises(ValueError, match=r"cluster.gpus=20 leaves 4 for the trainer, beside 16 by"):
        load("~parallel.dp", "cluster.gpus=20")
    with pytest.raises(ValueError, match=r"^cluster.gpus=31, but the recipe takes 32"):
        judge_recipe(load("cluster.gpus=31"))


def test_served_models_on_gpus_of_their_own_count() -> None:
    judged = ["judge.path=recipes/model/qwen3_30b_a3b", "judge.tp=4", "judge.engines=2"]
    score = ["reward.parts=[judge]", "reward.weights=[1]"]
    assert count_gpus(load(*judged, *score)) == 40
    assert load(*judged, *score, "~parallel.dp", "cluster.gpus=40").parallel.dp == 8


@pytest.mark.slow
def test_no_layout_beyond_the_budget_is_suggested() -> None:
    def suggest(*overrides: str) -> int | None:
        """Return the GPUs of the layout that is suggested."""
        config = load("plan.gpu_memory_gib=22", *overrides)
        found = judge_recipe(config).suggested
        return None if found is None else count_gpus(with_settings(config, found))

    assert suggest() == 144
    assert suggest("cluster.gpus=144") == 144
    assert suggest("cluster.gpus=143") is None


def test_the_recipe_that_one_starts_from(tmp_path: Path) -> None:
    assert find_base(QWEN, []) is None
    assert find_base(QWEN, ["parallel.tp=4"]) == load()
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"defaults: [{QWEN}, _self_]\nparallel: {{tp: 4}}\n")
    assert find_base(str(mine), []) == load()
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("defaults: [mine, _self_]\n")
    assert find_base(str(theirs), []) == load("parallel.tp=4")
    own = tmp_path / "own.yaml"
    own.write_text("defaults: [schema, _self_]\nparallel: {vpp: 2}\n")  # needs pp
    assert find_base(str(own), ["parallel.pp=2"]) is None


@pytest.mark.parametrize(
    ("command", "gib", "who"),
    [
        ("train", 40, "trainer ranks 0-15"),
        ("sft", 40, "trainer ranks"),
        ("eval", 30, "engine ranks"),
    ],
)
def test_a_command_is_refused_by_the_ranks_that_it_starts(command: str, gib: int, who: str) -> None:
    with pytest.raises(ValueError, match=rf"^plan.gpu_memory_gib={gib}: does not fit: {who}"):
        refuse_too_large(load(f"plan.gpu_memory_gib={gib}"), command)
    refuse_too_large(load(), command)
    if command == "eval":
        refuse_too_large(load("plan.gpu_memory_gib=45"), command)  # its trainer would not fit
