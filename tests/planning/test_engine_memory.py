"""Memory of an engine's ranks: weights where SGLang puts them, KV cache in its precision."""

from typing import Any

import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.engine_memory import _find_stages, predict_engine
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.resident_memory import NO_LINKS, count_sync_buffers

DEEPSEEK = "deepseek_v3_grpo_128"
LAYERS, DENSE_LAYERS = 61, 3


def uses_of(*settings: str) -> dict[str, Any]:
    config = load_recipe(DEEPSEEK, list(settings))
    (uses,) = predict_engine(PlannedRun.make(config))
    return uses


def test_fp8_halves_the_kv_cache() -> None:
    plain, fp8 = uses_of(), uses_of("rollout.sglang.kv_cache_dtype=fp8_e4m3")
    assert plain["KV cache"] == 300_000 * LAYERS * 576 * 2
    assert fp8["KV cache"] == plain["KV cache"] / 2
    assert fp8["weights"] == plain["weights"]


def test_keys_of_indexers_lie_beside_the_kv_cache() -> None:
    sparse = uses_of("model.path=recipes/model/deepseek_v32")
    assert sparse["index keys"] == 300_000 * LAYERS * (128 + 4)
    assert sparse["KV cache"] == uses_of()["KV cache"] and "index keys" not in uses_of()


@pytest.mark.parametrize(
    ("option", "whole"),
    [
        ("moe_dense_tp_size", DENSE_LAYERS * 3 * 18432 * 7168),
        ("moe_a2a_backend", (LAYERS - DENSE_LAYERS) * 3 * 2048 * 7168),
    ],
)
def test_weights_that_every_rank_has_whole(option: str, whole: int) -> None:
    cut = uses_of(f"rollout.sglang.{option}=null")["weights"]
    assert uses_of()["weights"] - cut == pytest.approx(2 * whole * 31 / 32)


def test_the_head_of_an_attention_group_is_cut_by_its_ranks() -> None:
    by_all = uses_of("rollout.sglang.enable_dp_lm_head=null")["weights"]
    rows = 129280
    assert uses_of()["weights"] - by_all == pytest.approx(
        2 * 7168 * rows * (1 / 8 - 1 / 32), rel=0.01
    )


def test_reading_slices_back_takes_one_more_bucket() -> None:
    without = uses_of("sync.verify=transfer")["sync buffers"]
    bucket = count_sync_buffers(load_recipe(DEEPSEEK, []).sync) // 4
    assert uses_of("sync.verify=destination")["sync buffers"] == without + bucket


def test_buffers_of_a_link_are_four_with_padding_and_header() -> None:
    buffers = count_sync_buffers(load_recipe(DEEPSEEK, ["sync.bucket_mib=2"]).sync)
    padded = 4 * 2 * 2**20 * 9 / 8
    assert padded < buffers < 1.02 * padded


QWEN3_NEXT_STATE = ((2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 4) // 8
"""Bytes on one of 8 ranks: the last inputs of the convolution, and a matrix of each head."""


@pytest.mark.parametrize(
    ("settings", "num_states"),
    [([], 5 * 10 + 1), (["rollout.sglang.max_mamba_cache_size=24"], 24 + 1)],
)
def test_a_quarter_of_qwen3_next_has_a_cache_and_the_rest_states_of_requests(
    settings: list[str], num_states: int
) -> None:
    settings = ["rollout.max_concurrency=10", *settings]
    (uses,) = predict_engine(PlannedRun.make(load_recipe("qwen3_next_80b_a3b_grpo_64", settings)))
    assert uses["KV cache"] == 1_000_000 * 12 * 2 * 256 * 2
    assert uses["linear attention"] == num_states * 36 * QWEN3_NEXT_STATE


def test_six_layers_of_nemotron_have_a_cache_and_23_states() -> None:
    settings = ["rollout.max_concurrency=10"]
    (uses,) = predict_engine(
        PlannedRun.make(load_recipe("nemotron3_nano_30b_a3b_grpo_8", settings))
    )
    inputs = (64 * 64 + 2 * 8 * 128) * 3 * 2
    state = (inputs + 64 * 64 * 128 * 4) // 4
    assert uses["KV cache"] == 1_000_000 * 6 * 2 * 128 * 2  # two heads, and four ranks with one
    assert uses["linear attention"] == (5 * 10 + 1) * 23 * state


def test_groups_of_data_parallel_attention_share_the_states() -> None:
    settings = ["rollout.max_concurrency=10", "rollout.attention_dp=2"]
    (uses,) = predict_engine(PlannedRun.make(load_recipe("qwen3_next_80b_a3b_grpo_64", settings)))
    assert uses["linear attention"] == (25 + 1) * 36 * 2 * QWEN3_NEXT_STATE


def test_an_engine_is_weighed_once_for_all_layouts_of_the_trainer() -> None:
    """Without that, a plan that does not fit takes minutes to find one that does."""
    _find_stages.cache_clear()
    for settings in ([], ["parallel.tp=2", "parallel.dp=16"], ["rollout.kv_cache_len=1000"]):
        run = PlannedRun.make(load_recipe("qwen3_next_80b_a3b_grpo_64", settings))
        predict_engine(run, NO_LINKS)
    assert _find_stages.cache_info().misses == 1
