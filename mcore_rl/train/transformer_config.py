"""Turns config.json into megatron-core's TransformerConfig and GPTModel arguments."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.ssm.gated_delta_net import common as gated_delta_net
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from mcore_rl.config import ParallelConfig, TrainConfig
from mcore_rl.config.training import WHOLE_LAYERS
from mcore_rl.device import megatron_options
from mcore_rl.device.upstream import refuse_unavailable
from mcore_rl.train.grouped_experts import check_grouped_products
from mcore_rl.train.hybrid import find_missing_kernels
from mcore_rl.weights.hf.config import moe_layers
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.recipe_checks import check_layout, check_sharing
from mcore_rl.weights.models.settings import read_rope
from mcore_rl.weights.models.table import HfConfig

RECOMPUTE_LAYERS = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
EXPERTS_MODULES = ("moe", "moe_act", "shared_experts")
ROWS_OF_A_BLOCK = {"blockwise": 128, "mxfp8": 32, "nvfp4": 32}
ACTIVATIONS = {"silu": F.silu, "quick_gelu": quick_gelu, "relu2": squared_relu}


def _leave_empty(weights: Tensor) -> Tensor:
    """Draw nothing: all weights are filled afterwards (train/weights.py)."""
    return weights


def make_transformer_config(
    config: HfConfig, parallel: ParallelConfig, dtype: torch.dtype, train: TrainConfig
) -> TransformerConfig:
    """Return megatron-core's configuration, with `train.megatron` on top of this system's choices.

    Raises ValueError if `parallel` does not divide the model, or if megatron-core or this machine
    cannot do what `train.megatron` asks for.
    """
    check_layout(config, parallel)
    options = family_of(config).options(config)
    _refuse_missing_kernels(config, options, parallel, train)
    kind = MLATransformerConfig if options.get("multi_latent_attention") else TransformerConfig
    settings = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # It also marks tensor-parallel parameters, which the gradient norm needs.
        "perform_initialization": True,
        "init_method": _leave_empty,
        "output_layer_init_method": _leave_empty,
        "embedding_init_method": _leave_empty,
        "calculate_per_token_loss": True,
        "moe_token_dispatcher_type": "alltoall",  # read for dense models, too
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        **megatron_options(),
        **_parallelism(parallel, dtype),
        **options,
        "activation_func": ACTIVATIONS[options.get("activation_func", "silu")],
    }
    if "num_moe_experts" in options:
        settings |= _experts(config, train)
    yarn = _yarn(config)
    if train.share_prefixes:
        check_sharing(config, parallel)
    settings |= _without_fusions(train, options, bool(yarn))
    settings |= {**_recompute(train, options), **_convert_options(train.megatron)}
    transformer_config = _build(kind, settings, train.megatron)
    # GPTModel reads these attributes, but megatron-core's dataclass has no such fields.
    vars(transformer_config).update(yarn)
    if train.expert_gemm == "grouped_mm":
        check_grouped_products(transformer_config)
    return transformer_config


def _without_fusions(
    train: TrainConfig, options: Mapping[str, Any], has_yarn: bool
) -> dict[str, bool]:
    """Return the fusions of kernels that are off, since they would compute something else."""
    without: dict[str, bool] = {}
    if options.get("rope_type") == "rope" or has_yarn or options.get("mrope_section"):
        # The fused kernel for latent attention needs yarn; the one for other attention has no yarn,
        # and counts the positions of packed sequences itself.
        without["apply_rope_fusion"] = False
    if train.share_prefixes:
        # The fused kernel counts the positions of sequences from 0.
        without["apply_rope_fusion"] = False
    if train.lora.rank:
        # Gradients of weights become those of factors; no buffer adds them up.
        without["gradient_accumulation_fusion"] = False
    return without


def _refuse_missing_kernels(
    config: HfConfig, options: Mapping[str, Any], parallel: ParallelConfig, train: TrainConfig
) -> None:
    refuse_unavailable(train.megatron, parallel.cp if "softmax_type" in options else 1)
    variant = options.get("experimental_attention_variant")
    if variant == "gated_delta_net" and not gated_delta_net.HAVE_FLA:
        raise ValueError(
            f"{config['architectures'][0]} has gated delta nets, whose kernels megatron-core takes"
            " from flash-linear-attention, which is not installed: pip install fla-core"
        )
    if options.get("is_hybrid_model") and (missing := find_missing_kernels()):
        raise ValueError(
            f"{config['architectures'][0]} has Mamba-2 layers, whose kernels megatron-core takes"
            f" from mamba-ssm and causal-conv1d: {missing}; pip install --no-build-isolation"
            " mamba-ssm causal-conv1d"
        )


def token_multiple(config: TransformerConfig) -> int:
    """Return the number that must divide the tokens of every rank.

    Matrix products in FP8 and FP4 take rows by the blocks of their scales, others by 16 rows
    (Transformer Engine's quantizers and cuBLAS).
    """
    if not (config.fp8 or config.fp4):
        return 1
    recipe = config.fp4_recipe if config.fp4 else config.fp8_recipe
    return ROWS_OF_A_BLOCK.get(str(recipe), 16)


def rotary_options(config: HfConfig) -> dict[str, Any]:
    """Return GPTModel's arguments for the rotary embedding; latent attention makes its own."""
    rope = read_rope(config)
    options: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": float(rope["rope_theta"]),
        "rotary_percent": family_of(config).rotary_share(config),
    }
    if rope["rope_type"] == "llama3":
        options |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    if _yarn(config):
        options["position_embedding_type"] = "yarn"
    if family_of(config).options(config).get("mrope_section"):
        options["position_embedding_type"] = "mrope"
    return options


def _stages(stage_layers: Sequence[int]) -> list[list[str]] | None:
    """Return what megatron-core puts on each pipeline stage, or on each model chunk."""
    if not stage_layers:
        return None
    stages = [["decoder"] * num_layers for num_layers in stage_layers]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def _convert_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return TransformerConfig's values for options of a recipe, which spells kernels by name."""
    typed = dict(options)
    if "attention_backend" in typed:
        names = [backend.name for backend in AttnBackend]
        if typed["attention_backend"] not in names:
            raise ValueError(
                f"train.megatron.attention_backend={typed['attention_backend']}: one of"
                f" {', '.join(names)}"
            )
        typed["attention_backend"] = AttnBackend[typed["attention_backend"]]
    return typed


def _build(
    kind: type[TransformerConfig], settings: Mapping[str, Any], passed: Mapping[str, Any]
) -> TransformerConfig:
    try:
        return kind(**settings)
    except (AssertionError, NotImplementedError, ValueError) as error:
        if not passed:
            raise
        shown = ", ".join(f"{name}={value}" for name, value in passed.items())
        raise ValueError(f"train.megatron with {shown}: megatron-core says {error}") from error


def _yarn(config: HfConfig) -> dict[str, Any]:
    """Return the attributes that GPTModel reads for yarn scaling; {} without it."""
    rope = read_rope(config)
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


def _recompute(train: TrainConfig, options: dict[str, Any]) -> dict[str, Any]:
    if train.recomputed == WHOLE_LAYERS:
        return RECOMPUTE_LAYERS
    without = () if "num_moe_experts" in options else EXPERTS_MODULES
    modules = [name for name in sorted(train.recomputed) if name not in without]
    if not modules:
        return {}
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
        "pipeline_model_parallel_layout": _stages(parallel.stage_layers),
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "pipeline_dtype": dtype,
        # Each micro-batch has its own length; train/schedule.py knows them.
        "variable_seq_lengths": parallel.pp > 1,
        # megatron-core would wait for the device on every hop, for the sake of old torch versions.
        "batch_p2p_sync": False,
    }
    if parallel.vpp:
        # With two stages the next rank is also the previous one, and batched sends would mix up the
        # two directions.
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return options
