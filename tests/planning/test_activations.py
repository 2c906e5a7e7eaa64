"""Activations of layers against hand-made sums."""

from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.planning.activations import Activations, Pass
from mcore_rl.slices.hf.config import read_hf_config

QWEN = read_hf_config("recipes/model/qwen3_30b_a3b")


def one_pass(tokens: int, **changes: Any) -> Pass:
    step = Pass(
        tokens,
        tp=1,
        cp=1,
        etp=1,
        itemsize=2,
        recompute="none",
        logprob_chunk=100,
        expert_load=1.0,
    )
    return replace(step, **changes)


def test_experts_make_most_of_a_layers_activations() -> None:
    step = one_pass(1024)
    routed = 8 * (2048 + 4 * 768)
    attention = 2 * 2048 + 2 * (4096 + 512) + 4096 + 512
    assert Activations(QWEN, step).kept(0) == 2 * 1024 * (
        routed + attention + 2 * 2048 + 2 * 128 * 2
    )


def test_full_recompute_keeps_a_layers_input_and_needs_the_rest_while_it_runs() -> None:
    def activations(recompute: str) -> Activations:
        return Activations(QWEN, one_pass(512, tp=2, cp=2, recompute=recompute))

    full = activations("full")
    none = activations("none")
    assert full.kept(0) == 512 / 2 / 2 * 2048 * 2
    assert full.working(0) == pytest.approx(none.working(0) + none.kept(0))


def test_logits_are_divided_by_tensor_and_context_parallelism() -> None:
    step = one_pass(512, tp=4, cp=2)
    own = 512 / 2
    assert Activations(QWEN, step).logits(1024) == 1024 / 4 * (own * 2 * 2 + 100 * 3 * 4)
    in_one = replace(step, logprob_chunk=1024)
    assert Activations(QWEN, in_one).logits(1024) == 1024 / 4 * own * (2 * 2 + 3 * 4)
