"""Activations of layers against hand-made sums."""

from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.config.training import WHOLE_LAYERS
from mcore_rl.planning.activations import LOSS_CHUNK, Activations, Pass
from mcore_rl.train.sparse.loss import BYTES_AT_ONCE
from mcore_rl.weights.hf.config import read_hf_config

QWEN = read_hf_config("recipes/model/qwen3_30b_a3b")
DEEPSEEK = read_hf_config("recipes/model/deepseek_v3")
SPARSE = read_hf_config("recipes/model/deepseek_v32")


def one_pass(tokens: int, **changes: Any) -> Pass:
    step = Pass(
        tokens,
        tp=1,
        cp=1,
        etp=1,
        itemsize=2,
        recomputed=frozenset(),
        logprob_chunk=100,
        expert_load=1.0,
    )
    return replace(step, **changes)


def test_experts_make_most_of_a_layers_activations() -> None:
    step = one_pass(1024)
    routed = 8 * (2048 + 4 * 768)
    attention = 2 * 2048 + 2 * (4096 + 512) + 4096 + 512
    assert Activations(QWEN, step).count_kept(0) == 2 * 1024 * (
        routed + attention + 2 * 2048 + 2 * 128 * 2
    )


def test_full_recompute_keeps_a_layers_input_and_needs_the_rest_while_it_runs() -> None:
    def activations(*recomputed: str) -> Activations:
        return Activations(QWEN, one_pass(512, tp=2, cp=2, recomputed=frozenset(recomputed)))

    full = activations(*WHOLE_LAYERS)
    none = activations()
    assert full.count_kept(0) == 512 / 2 / 2 * 2048 * 2
    assert full.count_working(0) == pytest.approx(none.count_working(0) + none.count_kept(0))
    # Modules that are computed again need what they don't keep.
    some = activations("layernorm", "moe_act")
    assert some.count_working(0) + some.count_kept(0) == pytest.approx(
        none.count_working(0) + none.count_kept(0)
    )


def test_logits_are_divided_by_tensor_and_context_parallelism() -> None:
    step = one_pass(512, tp=4, cp=2)
    own = 512 / 2
    assert Activations(QWEN, step).count_logits(1024) == 1024 / 4 * (own * 2 * 2 + 100 * 3 * 4)
    in_one = replace(step, logprob_chunk=1024)
    assert Activations(QWEN, in_one).count_logits(1024) == 1024 / 4 * own * (2 * 2 + 3 * 4)


@pytest.mark.parametrize(
    ("module", "model", "layer", "saved"),
    [
        ("layernorm", QWEN, 0, 2 * 2048),
        ("moe_act", QWEN, 0, 8 * 768),
        ("moe", QWEN, 0, 8 * (2048 + 4 * 768) + 2 * 128 * 2),
        ("core_attn", QWEN, 0, 0),
        ("mla_up_proj", DEEPSEEK, 0, 2 * 128 * 192 + 128 * 256 + 128 * 128),
        ("mlp", DEEPSEEK, 0, 3 * 18432),
        ("shared_experts", DEEPSEEK, 3, 3 * 2048),
    ],
)
def test_what_a_recomputed_module_does_not_keep(
    module: str, model: Any, layer: int, saved: float
) -> None:
    none = Activations(model, one_pass(256))
    without = Activations(model, one_pass(256, recomputed=frozenset({module})))
    assert none.count_kept(layer) - without.count_kept(layer) == pytest.approx(256 * 2 * saved)


def test_sparse_attention_without_a_kernel_keeps_scores_of_all_pairs() -> None:
    """Each head has queries and outputs as wide as the latent of keys, which all heads share."""
    tokens, heads = 1024, 128
    step = one_pass(tokens, sparse_kernel=True)
    dense = Activations(DEEPSEEK, step)
    fused, plain = Activations(SPARSE, step), Activations(SPARSE, one_pass(tokens))
    latent = 2 * 512 + 576
    of_dense = 2 * 192 + (128 + 128) + 128  # twice queries, keys and values, values again
    wanted = dense.count_kept(0) + 2 * tokens * heads * (192 + latent - of_dense)
    assert fused.count_kept(0) == wanted
    scores = heads * tokens**2 * (4 + 2)
    assert plain.count_kept(0) == wanted + scores
    index_scores = 64 * tokens**2 * 2 * 4
    assert plain.count_working(0) == fused.count_working(0) + index_scores
    again = Activations(SPARSE, one_pass(tokens, recomputed=frozenset({"core_attn"})))
    assert again.count_kept(0) == wanted
    assert again.count_working(0) == plain.count_working(0) + scores


def test_indexers_that_learn_keep_their_parts_and_gradients() -> None:
    tokens = 1024
    step = one_pass(tokens, sparse_kernel=True)
    frozen, trained = (
        Activations(SPARSE, replace(step, trains_indexers=trains)) for trains in (False, True)
    )
    parts = 64 * 128 + 128 + 64
    assert trained.count_kept(0) - frozen.count_kept(0) == tokens * parts * (4 + 2)
    target = tokens * 2048 * 2 * 4
    assert (
        trained.count_working(0) - frozen.count_working(0)
        == target + LOSS_CHUNK
        == (target + BYTES_AT_ONCE)
    )
