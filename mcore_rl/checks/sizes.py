"""Checks of a recipe's sizes against one another and the model; errors name both and a remedy."""

import re
from collections.abc import Mapping

from mcore_rl.config import (
    CriticConfig,
    DataConfig,
    DriftConfig,
    EvalConfig,
    ParallelConfig,
    RolloutConfig,
    TrainConfig,
)
from mcore_rl.weights.box import Box
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.low_precision import Precision, check_whole, is_rounded
from mcore_rl.weights.layouts.listed import join_rows
from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.layouts.sglang_models import SGLangSizes, refuse_unserved
from mcore_rl.weights.models import hf_tensor_shapes
from mcore_rl.weights.models.mtp import count_mtp_layers
from mcore_rl.weights.models.recipe_checks import check_layout, check_sharing


def check_sizes(
    policy: ModelFacts,
    parallel: ParallelConfig,
    critic: CriticConfig | None,
    train: TrainConfig,
    rollout: RolloutConfig,
    data: DataConfig,
    ranks_per_host: int,
) -> None:
    """Raise ValueError if a layout does not divide the model, or sequences are too long.

    critic   None if the algorithm has none

    Likewise if sequences are to share beginnings and cannot, or if the ranks of a tensor-parallel
    group do not fit one host.
    """
    check_layout(policy.config, parallel)
    _check_hosts(parallel, "parallel", ranks_per_host)
    if train.share_prefixes:
        check_sharing(policy.config, parallel)
    if train.fake_quantization != "none":
        check_rounding(policy, parallel, train.fake_quantization)
    if critic is not None:
        if train.share_prefixes:
            check_sharing(policy.config, critic.parallel, "critic.parallel")
        check_layout(policy.config, critic.parallel, "critic.parallel")
        _check_hosts(critic.parallel, "critic.parallel", ranks_per_host)
    check_lens(data, rollout, train, policy)


def check_rounding(policy: ModelFacts, parallel: ParallelConfig, precision: Precision) -> None:
    """Raise ValueError if trainer ranks cannot round the model's weights to `precision`.

    One matrix of each kind is looked at: those of other layers and experts are cut alike.
    """
    chosen = f"train.fake_quantization={precision} with model.path={policy.path}"
    if policy.stacks_experts:
        raise ValueError(
            f"{chosen}, whose experts are stacked in one tensor: only none is supported"
        )
    if policy.has_tower and precision == "fp8":
        raise ValueError(f"{chosen}: engines in fp8 serve no vision tower; use int4 or none")
    shapes = hf_tensor_shapes(policy.config)
    rounded = [name for name in shapes if is_rounded(precision, name)]
    if not rounded:
        raise ValueError(f"{chosen}: the model has no routed experts, which int4 is for; use none")
    sizes = MegatronSizes.from_config(parallel, policy.config)
    layout = MegatronLayout(policy.family, policy.config, sizes, "bfloat16")
    for name in {re.sub(r"\d+", "", name): name for name in rounded}.values():
        for piece in join_rows(layout.placement(name)).pieces:
            box = Box(name, piece.start, piece.stop)
            try:
                check_whole(precision, box, shapes[name], f"trainer rank {piece.ranks[0]}")
            except ValueError as error:
                raise ValueError(f"{chosen}: {error}") from None


def _check_hosts(parallel: ParallelConfig, group: str, ranks_per_host: int) -> None:
    tp = parallel.tp
    for first in range(0, parallel.world_size, tp):
        last = first + tp - 1
        if first // ranks_per_host != last // ranks_per_host:
            raise ValueError(
                f"{group}.tp={tp} puts ranks {first} to {last}, which exchange activations in every"
                f" layer, on two hosts of plan.ranks_per_host={ranks_per_host} GPUs: take a divisor"
                f" of it, or set plan.ranks_per_host to the GPUs of a host"
            )


def check_engines(
    policy: ModelFacts,
    dtype: str,
    rollout: RolloutConfig,
    drift: DriftConfig,
    data: DataConfig,
    evaluation: EvalConfig,
) -> None:
    """Raise ValueError if engines of these sizes cannot serve the model, or not rightly.

    dtype   model.dtype
    """
    if rollout.quantization != "none" and policy.has_tower:
        raise ValueError(
            f"rollout.quantization={rollout.quantization} with model.path={policy.path}: the"
            " engines would quantize its vision tower, too; use rollout.quantization=none"
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
    try:
        refuse_unserved(policy.config, SGLangSizes.from_config(rollout), dtype)
    except ValueError as error:
        raise ValueError(f"model.path={policy.path} in the recipe's engines: {error}") from None
    check_engine_sizes(rollout, policy)


def check_drafts(drift: DriftConfig, rollout: RolloutConfig, policy: ModelFacts) -> None:
    """Raise ValueError if engines of the model cannot speculate, or report of it what is wrong."""
    if rollout.speculate == "none":
        return
    sizes = policy.sizes
    problems = {
        "the model has sparse attention": "index_topk" in sizes,
        "the model has linear attention": bool({"mamba_heads", "delta_key_heads"} & sizes.keys()),
        "the model sees images": policy.has_tower,
        "the weights are kept in INT4": bool(policy.int4),
    }
    if rollout.speculate == "mtp":
        count = count_mtp_layers(policy.config)
        problems[f"config.json has {count} layers for multi-token prediction, not one"] = count != 1
    for problem, is_so in problems.items():
        if is_so:
            raise ValueError(
                f"rollout.speculate={rollout.speculate} with model.path={policy.path}: {problem},"
                " and what SGLang draws then is not known to be right; set rollout.speculate=none"
            )
    # SGLang counts the layer that guesses as layer 0, and what it reports of that as the model's.
    is_wrong = rollout.speculate == "ngram" or policy.moe_layers[0]
    if drift.routed_experts and policy.has_experts and is_wrong:
        raise ValueError(
            f"rollout.speculate={rollout.speculate} with drift.routed_experts=true: SGLang does not"
            " report the experts of tokens that were guessed; set drift.routed_experts=false, which"
            " train.router_replay=engine cannot do without, or rollout.speculate=none"
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
        key = "num_heads of vision_config"
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
