"""Checks that engines can serve a model as a recipe says; torch is not imported for them."""

from collections.abc import Mapping

from mcore_rl.config import DataConfig, DriftConfig, EvalConfig, RolloutConfig, TrainConfig
from mcore_rl.weights.hf.config import ModelFacts


def check_served(
    policy: ModelFacts,
    rollout: RolloutConfig,
    drift: DriftConfig,
    data: DataConfig,
    evaluation: EvalConfig,
) -> None:
    """Raise ValueError naming an option with which engines cannot serve the model, or not rightly.

    What SGLang's own classes refuse is left to checks/sizes.py.
    """
    if rollout.quantization == "int4" and not policy.has_gated_experts:
        raise ValueError(
            f"rollout.quantization=int4 with model.path={policy.path}: SGLang computes INT4 in"
            " routed experts with a gate, which the model does not have; use"
            " rollout.quantization=none"
        )
    if rollout.quantization == "fp8" and policy.has_tower:
        raise ValueError(
            f"rollout.quantization=fp8 with model.path={policy.path}: the engines would quantize"
            " its vision tower, too; use rollout.quantization=none, or int4 for routed experts"
        )
    if rollout.quantization != "none" and policy.stacks_experts:
        raise ValueError(
            f"rollout.quantization={rollout.quantization} with model.path={policy.path},"
            " whose experts are stacked in one tensor: only none is supported"
        )
    if rollout.pp > 1 and drift.routed_experts and policy.has_experts:
        raise ValueError(
            f"rollout.pp={rollout.pp} with drift.routed_experts=true: an engine of several pipeline"
            " stages reports the experts that the first stage chose, and no others; set"
            " drift.routed_experts=false"
        )
    check_drafts(drift, rollout, policy)
    check_indexer_reports(drift, rollout, policy)
    check_eval_lens(data, rollout, evaluation, policy)
    check_engine_sizes(rollout, policy)


def check_drafts(drift: DriftConfig, rollout: RolloutConfig, policy: ModelFacts) -> None:
    """Raise ValueError if engines of the model cannot speculate, or report of it what is wrong."""
    if rollout.speculate == "none":
        return
    sizes = policy.sizes
    problems = {
        "the model has sparse attention": "index_topk" in sizes,
        "the model has linear attention": "mamba_heads" in sizes
        or ("delta_key_heads" in sizes and rollout.speculate != "mtp"),
        "the model sees images": policy.has_tower,
        "its files have packed weights (INT4 or FP8)": policy.is_packed,
    }
    if rollout.speculate == "mtp":
        count = policy.family.mtp_layers(policy.config)
        problems[f"config.json has {count} layers for multi-token prediction, not one"] = count != 1
    for problem, is_so in problems.items():
        if is_so:
            raise ValueError(
                f"rollout.speculate={rollout.speculate} with model.path={policy.path}: {problem},"
                " and what SGLang draws then is not known to be right; set rollout.speculate=none"
            )
    if drift.routed_experts and policy.has_experts and rollout.speculate == "ngram":
        raise ValueError(
            f"rollout.speculate={rollout.speculate} with drift.routed_experts=true: SGLang does not"
            " report the experts of tokens that were guessed; set drift.routed_experts=false, and"
            " train.router_replay=none where it is engine, or rollout.speculate=none"
        )


def check_indexer_reports(drift: DriftConfig, rollout: RolloutConfig, policy: ModelFacts) -> None:
    """Raise ValueError if engines cannot report which keys indexers choose."""
    if not drift.indexer_topk:
        return
    if "index_topk" not in policy.sizes:
        raise ValueError(
            f"drift.indexer_topk=true with model.path={policy.path}: the model has no indexers; set"
            " drift.indexer_topk=false"
        )
    if rollout.pp > 1:
        raise ValueError(
            f"rollout.pp={rollout.pp} with drift.indexer_topk=true: an engine of several pipeline"
            " stages reports the keys that the first stage chose, and no others; set"
            " drift.indexer_topk=false"
        )
    if rollout.attention_dp != rollout.tp:
        raise ValueError(
            f"rollout.tp={rollout.tp} and rollout.attention_dp={rollout.attention_dp} with"
            " drift.indexer_topk=true: SGLang reports chosen keys only where each rank has all"
            f" heads; set rollout.attention_dp={rollout.tp}, or drift.indexer_topk=false"
        )


def check_engine_sizes(rollout: RolloutConfig, policy: ModelFacts) -> None:
    """Raise ValueError naming the first size of the model that the engines' ranks do not divide."""
    sizes = policy.sizes
    is_moe = policy.moe_layers
    attention_tp = rollout.tp // rollout.attention_dp
    by_attention = "rollout.tp"
    if rollout.attention_dp > 1:
        by_attention = "rollout.tp / rollout.attention_dp"
    num_heads = policy.config["num_attention_heads"]
    _check_divides(by_attention, attention_tp, "num_attention_heads", num_heads)
    kv_heads = sizes.get("kv_heads", attention_tp)
    if kv_heads % attention_tp and attention_tp % kv_heads:
        raise ValueError(
            f"{by_attention}={attention_tp} neither divides num_key_value_heads={kv_heads} of"
            " config.json nor is a multiple of it"
        )
    if any(is_moe):
        _check_divides("rollout.ep", rollout.ep, "the number of experts", sizes["experts"])
        by_expert = "rollout.tp / rollout.ep" if rollout.ep > 1 else "rollout.tp"
        expert_tp = rollout.tp // rollout.ep
        expert_size = "an expert's intermediate size"
        _check_divides(by_expert, expert_tp, expert_size, sizes["expert_ffn"])
    elif rollout.ep > 1:
        raise ValueError(f"rollout.ep={rollout.ep}, but the model has no experts: set rollout.ep=1")
    if not all(is_moe):
        _check_divides("rollout.tp", rollout.tp, "intermediate_size", sizes["dense_ffn"])
    if policy.has_tower and not rollout.sglang.get("mm_enable_dp_encoder"):
        key = "vision_config's number of heads"
        _check_divides("rollout.tp", rollout.tp, key, sizes["tower_heads"])
    if rollout.pp > len(is_moe):
        raise ValueError(
            f"rollout.pp={rollout.pp} exceeds num_hidden_layers={len(is_moe)} of config.json"
        )


def _check_divides(option: str, divisor: int, key: str, size: int) -> None:
    if size % divisor:
        raise ValueError(f"{option}={divisor} does not divide {key}={size} of config.json")


def check_lens(
    data: DataConfig, rollout: RolloutConfig, train: TrainConfig, policy: ModelFacts
) -> None:
    """Raise ValueError if prompt and response together exceed what has to hold them."""
    limits = {
        "train.max_tokens_per_microbatch": train.max_tokens_per_microbatch,
        "rollout.kv_cache_len": rollout.kv_cache_len,
    }
    _check_len(data, "rollout", rollout.max_response_len, limits, policy)


def check_eval_lens(
    data: DataConfig, rollout: RolloutConfig, evaluation: EvalConfig, policy: ModelFacts
) -> None:
    """Raise ValueError if prompts and responses of evaluations exceed what engines hold."""
    if evaluation.files and evaluation.max_response_len:
        limits = {"rollout.kv_cache_len": rollout.kv_cache_len}
        _check_len(data, "eval", evaluation.max_response_len, limits, policy)


def _check_len(
    data: DataConfig,
    group: str,
    max_response_len: int,
    limits: Mapping[str, int],
    policy: ModelFacts,
) -> None:
    """Check the responses whose length an option `group`.max_response_len bounds."""
    max_len = data.max_prompt_len + max_response_len
    lens = f"data.max_prompt_len + {group}.max_response_len = {max_len}"
    for name, limit in limits.items():
        if max_len > limit:
            raise ValueError(f"{lens} exceeds {name}={limit}: raise the latter")
    if max_len > policy.max_position_embeddings:
        raise ValueError(
            f"{lens} exceeds max_position_embeddings={policy.max_position_embeddings} of"
            " config.json: lower one of the former"
        )
