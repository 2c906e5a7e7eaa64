"""Writes the specs of the policy's engines from a checked Config."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_rl.config import DriftConfig, ModelConfig, RolloutConfig
from mcore_rl.config.deadlines import limit_batch
from mcore_rl.config.upstream.values import server_arguments
from mcore_rl.process.server_keys import ServerKeys
from mcore_rl.rollout.adapters import AdapterSlots
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.indexer_topk import IndexerTopkShape
from mcore_rl.rollout.packed_experts import RUNNER_ARGUMENTS
from mcore_rl.rollout.request import RoutedExpertsShape
from mcore_rl.rollout.speculation import Speculation, make_speculation
from mcore_rl.weight_sync.controller.engine_control import LOADER
from mcore_rl.weights.hf import fp8, int4
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.low_precision import Quantization

QUANTIZATION_CONFIGS: Mapping[Quantization, Mapping[str, Any] | None] = {
    "none": None,
    "fp8": fp8.QUANTIZATION_CONFIG,
    "int4": int4.QUANTIZATION_CONFIG,
}
"""rollout.quantization -> "quantization_config" of the model that engines serve."""


def _choose_speculation(rollout: RolloutConfig) -> Speculation | None:
    return make_speculation(rollout.speculate, rollout.speculate_tokens, rollout.speculate_when)


def make_engine_spec(
    model: ModelConfig,
    rollout: RolloutConfig,
    drift: DriftConfig,
    policy: ModelFacts,
    log_path: Path,
    keys: ServerKeys,
    *,
    seed: int,
    can_release_memory: bool = False,
    adapters: AdapterSlots | None = None,
) -> EngineSpec:
    """Return the spec of the policy's engines, which start with weights of version 0.

    seed                 run.seed
    can_release_memory   engines are on the trainer ranks' GPUs
    adapters             that engines serve beside the policy's weights

    Engines of random, quantized or packed models start with dummy weights; the first weight sync
    brings the real weights, from ranks that decode INT4 and FP8 files as they read them.
    """
    return EngineSpec(
        model_path=model.path,
        log_path=str(log_path),
        dtype=model.dtype,
        tp=rollout.tp,
        ep=rollout.ep,
        pp=rollout.pp,
        attention_dp=rollout.attention_dp,
        kv_cache_len=rollout.kv_cache_len,
        max_running=rollout.max_concurrency,
        deterministic=rollout.deterministic,
        routed_experts=find_experts_shape(drift, policy) is not None,
        indexer_topk=find_indexer_shape(drift, policy) is not None,
        trust_remote_code=model.trust_remote_code,
        custom_weight_loaders=(LOADER,),
        keys=keys,
        can_release_memory=can_release_memory,
        speculation=_choose_speculation(rollout),
        adapters=adapters,
        seed=seed,
        compiled=rollout.compiled,
        share_prompts=rollout.share_prompts,
        batch_timeout_s=limit_batch(rollout.request_timeout_s),
        extra_args=(
            *_list_weight_arguments(model, rollout.quantization, policy),
            *server_arguments(rollout.sglang),
        ),
    )


def _list_weight_arguments(
    model: ModelConfig, quantization: Quantization, policy: ModelFacts
) -> list[str]:
    """Return SGLang's arguments for the weights that an engine starts with."""
    # Some GPUs fuse shared experts into the routed ones, where the plan would not find them.
    arguments = ["--weight-version", "0", "--disable-shared-experts-fusion"]
    is_other = quantization != "none" or policy.is_packed
    if is_other or model.init == "random":
        arguments += ["--load-format", "dummy"]
    if is_other:
        settings = QUANTIZATION_CONFIGS[quantization]
        arguments += ["--json-model-override-args", json.dumps({int4.KEY: settings})]
    if quantization == "int4":
        arguments += RUNNER_ARGUMENTS
    return arguments


def find_experts_shape(drift: DriftConfig, policy: ModelFacts) -> RoutedExpertsShape | None:
    """Return the shape of the experts that engines report, or None if they report none."""
    if not drift.routed_experts or not policy.has_experts:
        return None
    return RoutedExpertsShape(policy.moe_layers, policy.experts_per_token, policy.num_experts)


def find_indexer_shape(drift: DriftConfig, policy: ModelFacts) -> IndexerTopkShape | None:
    """Return the shape of the chosen keys that engines report, or None if they report none."""
    if not drift.indexer_topk:
        return None
    return IndexerTopkShape(policy.sizes["layers"], policy.sizes["index_topk"])
