"""The memory of ranks in words: verdict, and the recipe's arithmetic."""

from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.peak_memory import RankMemory
from mcore_rl.planning.plan import explain, make_memory_table
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.verdict import judge

GIB = 2**30
CONFIG = load_recipe("qwen3_30b_a3b_grpo_8", ["plan.gpu_memory_gib=80"])


def rank(gib: float) -> RankMemory:
    uses = {"weights": (gib - 1) * GIB, "activations": 1.0 * GIB}
    return RankMemory("trainer", "trainer ranks 0-7", "train step", uses, num_processes=2)


def test_ranks_that_fit_and_how_full_they_are() -> None:
    fits, sentence = judge(CONFIG.plan, [rank(7), rank(35)])
    assert fits
    assert sentence == (
        "fits: trainer ranks 0-7 are the fullest, 50% of what there is; most is weights"
    )


def test_ranks_that_do_not_fit_are_told_by_how_much() -> None:
    fits, sentence = judge(CONFIG.plan, [rank(70), rank(71)])
    assert not fits
    assert sentence == (
        "does not fit: trainer ranks 0-7 are 1.0 GiB beyond 80 GiB at their train step; most is"
        " weights, 70.0 GiB."
    )


def test_the_arithmetic_of_a_recipe() -> None:
    layout, memory, batch = explain(PlannedRun.make(CONFIG), CONFIG.data, [rank(35)])
    assert layout == (
        "Layout: 8 trainer ranks (TP 4, CP 2, EP 8), 4 engines of 2 ranks (TP 2, EP 2) on the same"
        " GPUs."
    )
    assert "trainer ranks 0-7 35.0 GiB at their train step (weights 34.0)" in memory
    assert batch.startswith("Batch: 128 prompts x 16 = 2,048 sequences of at most 2,048 + 8,192")


def test_a_table_has_a_row_for_each_kind_of_rank() -> None:
    table = make_memory_table(CONFIG.plan, [rank(7), rank(35)])
    assert table.row_count == 2
    assert list(table.columns[-1].cells) == ["70.0", "70.0"]
