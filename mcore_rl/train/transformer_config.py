"""Turns config.json into megatron-core's TransformerConfig and GPTModel arguments."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from mcore_rl.config import ParallelConfig, TrainConfig
from mcore_rl.device import megatron_options
from mcore_rl.slices.families import family_of, rope_of
from mcore_rl.slices.families.table import HfConfig
from mcore_rl.slices.hf.config import moe_layers
from mcore_rl.slices.layouts.check import check_layout

RECOMPUTE: Mapping[str, dict[str, Any]] = {
    "none": {},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


ACTIVATIONS = {"silu": F.silu, "quick_gelu": quick_gelu}


def make_transformer_config(
    config: HfConfig, parallel: ParallelConfig, dtype: torch.dtype, train: TrainConfig
) -> TransformerConfig:
    """Return megatron-core's configuration; ValueError if `parallel` does not divide the model."""
    check_layout(config, parallel)
    options = family_of(config).options(config)
    kind = MLATransformerConfig if options.get("multi_latent_attention") else TransformerConfig
    settings = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # The initial weights are overwritten, but this also marks tensor-parallel parameters, which
        # the gradient norm needs.
        "perform_initialization": True,
        "calculate_per_token_loss": True,
        # The only one for sequences of any length; megatron-core reads it for dense models, too.
        "moe_token_dispatcher_type": "alltoall",
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        **megatron_options(),
        **_parallelism(parallel, dtype),
        **_recompute(train.recompute, options),
        **options,
        "activation_func": ACTIVATIONS[options.get("activation_func", "silu")],
    }
    if "num_moe_experts" in options:
        settings |= _experts(config, train)
    yarn = _yarn(config)
    if options.get("rope_type") == "rope" or yarn:
        # The fused kernel for latent attention needs yarn; the one for other attention has no yarn.
        settings["apply_rope_fusion"] = False
    transformer_config = kind(**settings)
    for name, value in yarn.items():
        # GPTModel reads these attributes, but megatron-core's dataclass has no such fields.
        setattr(transformer_config, name, value)
    return transformer_config


def rotary_options(config: HfConfig) -> dict[str, Any]:
    """Return GPTModel's arguments for the rotary embedding; latent attention makes its own."""
    rope = rope_of(config)
    options: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": float(rope["rope_theta"]),
        "rotary_percent": family_of(config).rotary_share(config),
    }
    if rope["rope_type"] == "llama3":
        options |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    if _yarn(config):
        options["position_embedding_type"] = "yarn"
    return options


def _yarn(config: HfConfig) -> dict[str, Any]:
    """Return the attributes that GPTModel reads for yarn scaling; {} without it."""
    rope = rope_of(config)
    is_latent = family_of(config).options(config).get("multi_latent_attention")
    if rope["rope_type"] != "yarn" or is_latent:
        return {}
    return {
        "yarn_rotary_scaling_factor": float(rope["factor"]),
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": float(rope.get("beta_fast", 32)),
        "yarn_beta_slow": float(rope.get("beta_slow", 1)),
        "yarn_mscale": rope.get("mscale"),
        "yarn_mscale_all_dim": rope.get("mscale_all_dim"),
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }


def _recompute(recompute: str, options: dict[str, Any]) -> dict[str, Any]:
    if recompute != "selective":
        return RECOMPUTE[recompute]
    modules = ["layernorm"] + (["moe_act"] if "num_moe_experts" in options else [])
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def _experts(config: HfConfig, train: TrainConfig) -> dict[str, Any]:
    return {
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [train.router_aux_loss_coef, train.router_sequence_aux_loss_coef],
        "moe_layer_freq": 1 if all(moe_layers(config)) else moe_layers(config),
        "moe_grouped_gemm": True,
    }


def _parallelism(parallel: ParallelConfig, dtype: torch.dtype) -> dict[str, Any]:
    options: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tp,
        "sequence_parallel": parallel.tp > 1,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "pipeline_dtype": dtype,
        "variable_seq_lengths": parallel.pp > 1,
    }
    if parallel.vpp:
        # With two stages the next rank is also the previous one, and batched sends would mix up the
        # two directions.
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return options
