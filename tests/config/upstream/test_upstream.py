"""Options for upstream are checked by name, type and owner."""

from typing import Any

import pytest

from mcore_rl.config import upstream
from mcore_rl.config.upstream import (
    TO_DDP,
    TO_ENGINES,
    TO_OPTIMIZER,
    TO_SERVED,
    TO_TRANSFORMER,
    OpenGroup,
    check_passed,
)

OWNERS = {
    "parallel": "critic.parallel",
    "optimizer": "critic.optimizer",
    "engine": "judge",
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (TO_TRANSFORMER, {"moe_permute_fusion": True, "fp8": "hybrid", "cp_comm_type": "a2a"}),
        (TO_TRANSFORMER, {"moe_token_dispatcher_type": "flex"}),
        (
            TO_TRANSFORMER,
            {"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]},
        ),
        (TO_OPTIMIZER, {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16"}),
        (TO_OPTIMIZER, {"grad_norm_skip_threshold": 10.0}),
        (TO_DDP, {"overlap_grad_reduce": True, "bucket_size": 40_000_000}),
        (TO_ENGINES, {"kv_cache_dtype": "fp8_e4m3", "enable_hierarchical_cache": True}),
        (TO_SERVED, {"quantization": "fp8", "load_format": "auto"}),
        (TO_SERVED, {}),
    ],
)
def test_fields_of_upstream_may_be_set(kind: OpenGroup, options: dict[str, Any]) -> None:
    check_passed("group", options, kind, OWNERS)


def test_without_sglang_only_owners_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "is_installed", lambda cls: False)
    check_passed("rollout.sglang", {"mem_fraction_static": "much"}, TO_ENGINES, OWNERS)
    with pytest.raises(ValueError, match=r"rollout.sglang.tp_size=2: set judge.tp"):
        check_passed("rollout.sglang", {"tp_size": 2}, TO_ENGINES, OWNERS)


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        (TO_TRANSFORMER, "moe_permut_fusion", True, "no such field. Did you mean moe_permute"),
        (TO_TRANSFORMER, "zzzzzzzz", 1, "TransformerConfig has no such field.$"),
        (TO_TRANSFORMER, "expert_model_parallel_size", 8, "set critic.parallel.ep$"),
        (TO_TRANSFORMER, "hidden_size", 8, "config.json decides it; change model.path"),
        (TO_TRANSFORMER, "moe_router_fusion", True, "neither replays experts nor reports"),
        (TO_TRANSFORMER, "moe_paged_stash", True, "needs moe_expert_rank_capacity_factor"),
        (TO_TRANSFORMER, "moe_permute_fusion", 1, "moe_permute_fusion is declared as bool"),
        (TO_TRANSFORMER, "grad_scale_func", "f", "takes a Python object"),
        (TO_TRANSFORMER, "moe_token_dispatcher_type", "allgather", "only alltoall or flex here"),
        (TO_TRANSFORMER, "recompute_modules", ["moe"], "set train.recompute$"),
        (TO_OPTIMIZER, "lr", 1.0, "set critic.optimizer.lr$"),
        (TO_OPTIMIZER, "exp_avg_dtype", "float16", "only float32 or bfloat16 here"),
        (TO_OPTIMIZER, "muon_tp_mode", "blockwise", "a step would depend on the model's tp"),
        (TO_OPTIMIZER, "muon_coefficient_type", "septic", "only simple or quintic or "),
        (
            TO_OPTIMIZER,
            "lion_beta2",
            0.9,
            "set critic.optimizer.beta2 and critic.optimizer.name=lion",
        ),
        (TO_OPTIMIZER, "sgd_momentum", 0.9, "has no checkpoint of SGD"),
        (TO_OPTIMIZER, "optimizer", "muon", "set critic.optimizer.name$"),
        (TO_OPTIMIZER, "use_layer_wise_distributed_optimizer", True, "belong to one layout"),
        (TO_OPTIMIZER, "optimizer_cpu_offload", True, "critic.optimizer.megatron.use_precision"),
        (TO_DDP, "overlap_param_gather", True, "read all weights right after a step"),
        (TO_ENGINES, "tp_size", 2, "set judge.tp$"),
        (TO_ENGINES, "attention_backend", "fa9", "is one of triton, .*fa3"),
        (TO_ENGINES, "hicache_storage_backend", "file", "mix old and new weights"),
        (TO_ENGINES, "enable_eplb", True, "sends each weight to the rank that holds it"),
        (TO_ENGINES, "kt_method", "x", "writes weights in GPU memory"),
        (TO_ENGINES, "speculative_algorithm", "EAGLE", "set rollout.speculate$"),
        (TO_ENGINES, "disable_cuda_graph", True, "command line has no such option"),
        (TO_SERVED, "tp_size", 2, "set judge.tp$"),
        (TO_SERVED, "mem_fraction_static", "much", "declared as Optional"),
    ],
)
def test_what_is_refused_and_why(kind: OpenGroup, name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        check_passed("the.group", {name: value}, kind, OWNERS)
    assert str(raised.value).startswith(f"the.group.{name}=")
