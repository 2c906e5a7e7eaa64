"""Builds this rank's megatron-core GPTModel chunks, not yet filled, from HF config and layout."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mcore_rl.device import attention_with_sinks
from mcore_rl.train.interleaved_experts import with_halves
from mcore_rl.train.projection_norm import ProjectionNorm
from mcore_rl.train.router import TokenWeightedRouter
from mcore_rl.train.transformer_config import rotary_options
from mcore_rl.train.value_head import ValueHead
from mcore_rl.train.vision.deepstack import DeepstackLayer
from mcore_rl.train.vision.model import VisionLanguageModel
from mcore_rl.weights.hf.config import padded_vocab_size
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfConfig
from mcore_rl.weights.models.value_head import has_value_head


def make_chunks(config: TransformerConfig, hf_config: HfConfig) -> list[GPTModel]:
    """Return one GPTModel per virtual pipeline stage of this rank, parameters uninitialized."""
    stages = range(config.virtual_pipeline_model_parallel_size or 1)
    virtual = config.virtual_pipeline_model_parallel_size is not None
    chunks = [_make_chunk(config, hf_config, stage if virtual else None) for stage in stages]
    _mark_parameters(chunks)
    return chunks


def _make_chunk(config: TransformerConfig, hf_config: HfConfig, vp_stage: int | None) -> GPTModel:
    value_head = has_value_head(hf_config)
    tied = not value_head and hf_config.get("tie_word_embeddings", False)
    kind: Any = GPTModel
    if family_of(hf_config).has_tower:
        kind = partial(VisionLanguageModel, hf_config=hf_config)
    chunk = kind(
        config,
        _make_spec(config, hf_config, vp_stage),
        vocab_size=padded_vocab_size(hf_config, config.tensor_model_parallel_size),
        max_sequence_length=hf_config["max_position_embeddings"],
        **rotary_options(hf_config),
        share_embeddings_and_output_weights=tied,
        parallel_output=True,
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        vp_stage=vp_stage,
    )
    if value_head and chunk.post_process:
        chunk.output_layer = ValueHead(config)  # type: ignore[assignment]
    return chunk.cuda()


def _make_spec(
    config: TransformerConfig, hf_config: HfConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    family = family_of(hf_config)
    sizes = family.sizes(hf_config)
    with_sinks = None
    if config.softmax_type != "vanilla":
        with_sinks = attention_with_sinks(config.context_parallel_size)
    for layer in spec.layer_specs or ():
        if sizes.get("deepstack_mergers"):
            layer.module = DeepstackLayer
        if sizes.get("q_norm", 0) > sizes.get("head", 0):
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm, attention.k_layernorm = (
                ModuleSpec(ProjectionNorm, params={"num_heads": num_heads})
                for num_heads in (config.num_attention_heads, config.num_query_groups)
            )
        if with_sinks is not None:
            layer.submodules.self_attention.submodules.core_attention = with_sinks
        experts = layer.submodules.mlp.submodules
        if isinstance(experts, MoESubmodules):
            experts.router = TokenWeightedRouter
            if family.alternating:
                linears = experts.experts.submodules  # type: ignore[union-attr]
                linears.linear_fc1 = with_halves(linears.linear_fc1)
    return spec


def _mark_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Mark which parameters are experts, and which count in the gradient norm on every rank.

    Routed experts always go to the expert data-parallel buffers and optimizer. megatron-core puts
    them there only if EP > 1; that makes gradients wrong for ETP != TP with EP = 1, and it gives
    layouts different optimizer structures, between which checkpoints do not reshard.

    Experts and attention sinks are sharded, so the norm must add up those of all tensor-parallel
    ranks. megatron-core does not mark biases and sinks; the norm would hold rank 0's only.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            is_expert = ".experts." in name
            if is_expert:
                parameter.allreduce = False  # type: ignore[attr-defined]
            if is_expert or name.endswith(".softmax_offset"):
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
