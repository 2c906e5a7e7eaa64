"""HuggingFace config.json in, megatron-core's TransformerConfig and GPTModel arguments out; nothing is
typed twice.
"""

from collections.abc import Mapping
from math import lcm
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from mcore_rl.config import ParallelConfig
from mcore_rl.device import megatron_options
from mcore_rl.slices import hf_files
from mcore_rl.slices.families import family_of
from mcore_rl.slices.families.table import HfConfig

VOCAB_MULTIPLE = 128
RECOMPUTE: Mapping[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """The parsed config.json of a supported model's HF directory; ValueError names what is wrong with it."""
    config = hf_files.read_hf_config(Path(path))
    family_of(config)
    _refuse_unsupported(config, Path(path) / "config.json")
    return config


def _refuse_unsupported(config: HfConfig, file: Path) -> None:
    supported = {
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "rope_scaling": None,
    }
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key}={config[key]!r} in {file}: only {value!r} is supported")
    rope_type = (config.get("rope_parameters") or {}).get("rope_type", "default")
    if rope_type != "default":
        raise ValueError(f"rope_type={rope_type!r} in {file}: only 'default' is supported")


def padded_vocab_size(config: HfConfig, tp: int) -> int:
    """Rows of the embedding in memory, the same for every usual `tp` so that checkpoints reshard."""
    multiple = lcm(VOCAB_MULTIPLE, tp)
    return -(-config["vocab_size"] // multiple) * multiple


def rope_theta(config: HfConfig) -> float:
    return float((config.get("rope_parameters") or config).get("rope_theta", 10000.0))


def num_experts(config: HfConfig) -> int:
    return family_of(config).sizes(config)["experts"]


def moe_layers(config: HfConfig) -> list[int]:
    """1 for each layer with experts, 0 for each dense one."""
    family = family_of(config)
    return [int(family.is_moe_layer(config, i)) for i in range(config["num_hidden_layers"])]


def make_transformer_config(
    config: HfConfig, parallel: ParallelConfig, dtype: torch.dtype, recompute: str, aux_loss_coef: float
) -> TransformerConfig:
    """megatron-core's configuration of this rank's model. ValueError where `parallel` does not divide the
    model.
    """
    check_layout(config, parallel)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config["rms_norm_eps"],
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        perform_initialization=True,  # overwritten, but it also marks tensor-parallel parameters for the norm
        calculate_per_token_loss=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        **_experts(config, aux_loss_coef),
        **_parallelism(parallel, dtype),
        **RECOMPUTE[recompute],
        **megatron_options(),
    )


def _experts(config: HfConfig, aux_loss_coef: float) -> dict[str, Any]:
    return {
        "num_moe_experts": num_experts(config),
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": aux_loss_coef,
        "moe_layer_freq": 1 if all(moe_layers(config)) else moe_layers(config),
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
    }


def _parallelism(parallel: ParallelConfig, dtype: torch.dtype) -> dict[str, Any]:
    options: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tp,
        "sequence_parallel": parallel.tp > 1,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "pipeline_dtype": dtype,
        "variable_seq_lengths": parallel.pp > 1,
    }
    if parallel.vpp:
        # With two stages the next and the previous rank are one, and batched sends would mix up the
        # directions.
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return options


def check_layout(config: HfConfig, parallel: ParallelConfig) -> None:
    """ValueError naming the first size of the model that `parallel` does not divide."""
    stages = parallel.pp * (parallel.vpp or 1)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    for option, divisor, key, size in (
        ("parallel.tp", parallel.tp, "num_attention_heads", heads),
        ("parallel.tp", parallel.tp, "num_key_value_heads", groups),
        ("parallel.pp * parallel.vpp", stages, "num_hidden_layers", config["num_hidden_layers"]),
        ("parallel.ep", parallel.ep, "num_experts", num_experts(config)),
        ("parallel.etp", parallel.etp, "moe_intermediate_size", config["moe_intermediate_size"]),
    ):
        if size % divisor:
            raise ValueError(f"{option}={divisor} does not divide {key}={size} of config.json")
