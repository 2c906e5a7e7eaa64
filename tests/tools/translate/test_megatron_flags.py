"""Arguments of Megatron's and SGLang's command lines become fields of their classes."""

from typing import Any

import pytest

from mcore_rl.config.upstream.fields import TRANSFORMER, read_fields
from mcore_rl.tools.translate.translation import (
    ForeignOptions,
    RecipeLine,
    is_field,
    translate_flags,
    type_of,
)
from tests.tools.translate.accounts import decided, values
from tests.tools.translate.peer_options import slime


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"attention_softmax_in_fp32": True}, "train.megatron.attention_softmax_in_fp32", True),
        ({"no_rope_fusion": True}, "train.megatron.apply_rope_fusion", False),
        ({"no_masked_softmax_fusion": True}, "train.megatron.masked_softmax_fusion", False),
        ({"accumulate_allreduce_grads_in_fp32": True}, "train.ddp.grad_reduce_in_fp32", True),
        ({"overlap_grad_reduce": True}, "train.ddp.overlap_grad_reduce", True),
        ({"ddp_bucket_size": 9}, "train.ddp.bucket_size", 9),
        ({"fp8_format": "e4m3"}, "train.megatron.fp8", "e4m3"),
        ({"sglang_attention_backend": "fa3"}, "rollout.sglang.attention_backend", "fa3"),
        ({"sglang_chunked_prefill_size": 64}, "rollout.sglang.chunked_prefill_size", 64),
    ],
)
def test_fields_are_handed_on(given: dict[str, Any], key: str, value: object) -> None:
    assert values(slime(**given))[key] == value


def test_a_single_word_of_a_list_is_a_list() -> None:
    assert type_of(read_fields(TRANSFORMER)["recompute_modules"].kind).startswith("List[")
    options = ForeignOptions({"--sglang-cuda-graph-bs-decode": 8, "--bf16": True}, is_whole=False)
    [line] = translate_flags(options, {"--bf16": "model.dtype"}.get)
    assert isinstance(line, RecipeLine) and line.value == [8]
    assert "--bf16" in options.list_left()


@pytest.mark.parametrize(
    ("kind", "ours"),
    [("aux_loss", "router_aux_loss_coef"), ("seq_aux_loss", "router_sequence_aux_loss_coef")],
)
def test_the_loss_that_balances_experts_is_named_by_its_kind(kind: str, ours: str) -> None:
    found = values(slime(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.01))
    assert found[f"train.{ours}"] == 0.01
    assert "--moe-router-load-balancing-type" in decided(
        slime(moe_router_load_balancing_type="sinkhorn")
    )


def test_deepep_comes_with_its_dispatcher() -> None:
    given = {"moe_enable_deepep": True, "moe_token_dispatcher_type": "flex"}
    found = values(slime(**given))
    assert found["train.megatron.moe_flex_dispatcher_backend"] == "deepep"
    assert is_field(TRANSFORMER, "moe_flex_dispatcher_backend")
    assert not is_field(TRANSFORMER, "nonsense")
