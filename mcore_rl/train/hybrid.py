"""Builds a chunk of a hybrid model, whose layers are Mamba-2, attention, experts or dense MLPs.

    letters of the layers            M E M * E -
    stages of the pipeline (pp=2)    M E M | * E -      megatron-core's hybrid_layer_pattern

megatron-core's GPTModel has attention and an MLP in each layer; its HybridModel has one of them.
"""

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.extensions import transformer_engine_spec_provider as providers
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from mcore_rl.config.training import ExpertGemm
from mcore_rl.train.grouped_experts import use_grouped_products
from mcore_rl.train.router import TokenWeightedRouter
from mcore_rl.weights.hf.config import pad_vocab_size
from mcore_rl.weights.layouts.megatron import list_chunk_layers
from mcore_rl.weights.models.nemotron import read_pattern
from mcore_rl.weights.models.table import HfConfig


def find_missing_kernels() -> str:
    """Return why this machine cannot run Mamba-2 layers on packed sequences; "" if it can."""
    if not mamba_mixer.HAVE_MAMBA_SSM:
        return "mamba-ssm is not installed"
    is_packed, reason = mamba_mixer._check_mamba_sequence_packing_support(
        for_inference_not_training=False
    )
    return "" if is_packed else str(reason)


def is_hybrid(chunk: torch.nn.Module) -> bool:
    return isinstance(chunk, HybridModel)


def make_hybrid_chunk(
    config: TransformerConfig,
    hf_config: HfConfig,
    expert_gemm: ExpertGemm,
    vp_stage: int | None,
) -> HybridModel:
    """Return this rank's HybridModel of one virtual pipeline stage, parameters uninitialized."""
    chunk = HybridModel(
        config,
        ModuleSpec(HybridStack, submodules=_make_submodules(config, expert_gemm)),
        vocab_size=pad_vocab_size(hf_config, config.tensor_model_parallel_size),
        max_sequence_length=hf_config["max_position_embeddings"],
        hybrid_layer_pattern=_divide_pattern(config, hf_config),
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        vp_stage=vp_stage,
    )
    for module in chunk.modules():
        if isinstance(module, MambaMixer):  # megatron-core makes these in float32
            module.A_log.data = module.A_log.data.to(config.params_dtype)
            module.D.data = module.D.data.to(config.params_dtype)
    return chunk


def _divide_pattern(config: TransformerConfig, hf_config: HfConfig) -> str:
    """Return the letters of all layers, with a bar between two model chunks."""
    letters = read_pattern(hf_config)
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    layout: Any = config.pipeline_model_parallel_layout
    counts: list[int] = []
    if layout is not None:
        counts = [
            layout.layout[stage][chunk].count(LayerType.decoder)
            for chunk in range(vpp or 1)
            for stage in range(pp)
        ]
    chunks = list_chunk_layers(len(letters), pp, vpp, counts)
    return "|".join(letters[layers.start : layers.stop] for layers in chunks)


def _make_submodules(config: TransformerConfig, expert_gemm: ExpertGemm) -> HybridStackSubmodules:
    backend = providers.TESpecProvider()
    normed, row = backend.column_parallel_layer_norm_linear(), backend.row_parallel_linear()
    mixer = MambaMixerSubmodules(in_proj=normed, out_proj=row)
    attention = SelfAttentionSubmodules(
        linear_qkv=normed, core_attention=backend.core_attention(), linear_proj=row
    )
    layers: dict[str, Any] = {
        "mamba_layer": ModuleSpec(
            MambaLayer,
            submodules=MambaLayerSubmodules(
                mixer=ModuleSpec(MambaMixer, submodules=mixer), mamba_bda=get_bias_dropout_add
            ),
        ),
        "attention_layer": ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(
                self_attention=ModuleSpec(
                    SelfAttention,
                    params={"attn_mask_type": AttnMaskType.causal},
                    submodules=attention,
                ),
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        "mlp_layer": ModuleSpec(
            MLPLayer,
            submodules=TransformerLayerSubmodules(
                mlp=partial(
                    MLP.as_mlp_submodule,
                    submodules=MLPSubmodules(linear_fc1=normed, linear_fc2=row),
                ),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    }
    if config.num_moe_experts:
        layers["moe_layer"] = _make_experts(backend, config, expert_gemm)
    return HybridStackSubmodules(**layers)


def _make_experts(backend: Any, config: TransformerConfig, expert_gemm: ExpertGemm) -> ModuleSpec:
    experts: Any = get_moe_module_spec_for_backend(
        backend, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    experts.keywords["submodules"].router = TokenWeightedRouter
    if expert_gemm == "grouped_mm":
        experts = use_grouped_products(experts)
    return ModuleSpec(
        MoETransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=backend.layer_norm(), mlp=experts, mlp_bda=get_bias_dropout_add
        ),
    )
