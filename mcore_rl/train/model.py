"""Builds this rank's megatron-core model chunks, not yet filled, from HF config and layout.

These modules replace those of megatron-core where a model differs from it:

    with_halves      experts whose first linear layer alternates gate and up rows (gpt-oss):
                     linear_fc1 gives   g0 u0 g1 u1 g2 u2     (the rows of the HF tensor)
                     the activation     g0 g1 g2 u0 u1 u2     (what megatron-core expects)
    ProjectionNorm   RMSNorm of queries or keys over all heads of a token, on several ranks
    ValueHead        a critic's output layer: one number per token from its hidden state
    DeltaNet         a gated delta net whose decay is computed in float32
    PlainNorm        the norm of a delta net's outputs, times weight where others have 1 + weight
"""

from collections.abc import Sequence
from copy import copy
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from mcore_rl.config.training import ExpertGemm
from mcore_rl.train.grouped_experts import use_grouped_products
from mcore_rl.train.hybrid import make_hybrid_chunk
from mcore_rl.train.mtp.layers import make_mtp_block
from mcore_rl.train.router import TokenWeightedRouter
from mcore_rl.train.sparse.attention import adapt_sparse_attention
from mcore_rl.train.transformer_config import rotary_options
from mcore_rl.train.vision.model import DeepstackLayer, VisionLanguageModel
from mcore_rl.weights.hf.config import pad_vocab_size
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.mtp import TRAINED
from mcore_rl.weights.models.table import HfConfig
from mcore_rl.weights.models.value_head import has_value_head

Chunk: TypeAlias = "GPTModel | HybridModel"
"""The layers of a virtual pipeline stage, with the embedding or the output layer at the ends."""


class _Alternating:
    """Marks the classes that `with_halves` makes."""


@cache
def with_halves(linear: type) -> type:
    """Return a subclass of linear_fc1's class whose output has the gate first, then up.

    The weight keeps the alternating rows of the HF tensor. Stored in halves, every row would be a
    slice of its own in load and weight sync. A class made here is returned unchanged, since layers
    share their spec.
    """
    if issubclass(linear, _Alternating):
        return linear

    class AlternatingLinear(_Alternating, linear):
        def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
            out, bias = super().forward(*args, **kwargs)
            assert bias is None, (
                "linear_fc1 must add its bias itself, before the rows are reordered"
            )
            return out.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), None

    return AlternatingLinear


class _SumOverRanks(torch.autograd.Function):
    """All-reduce in both directions.

    Every tensor-parallel rank continues with the total, so the gradient of a rank's part is the sum
    of all ranks' gradients.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ps.get_tensor_model_parallel_group())
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _SumOverRanks.forward(ctx, grads[0])


class ProjectionNorm(torch.nn.Module):
    """RMSNorm over the whole projection, as in OLMoE (arXiv:2409.02060, section 2) and MiniMax-M2.

    megatron-core normalizes each head separately. Every tensor-parallel rank holds the whole weight
    and uses its heads' part; Megatron sums the gradients of such norms over these ranks. Forward
    and backward each all-reduce 4 bytes per token.
    """

    def __init__(
        self, num_heads: int, hidden_size: int, config: TransformerConfig, eps: float
    ) -> None:
        """num_heads     query heads or key-value heads of the whole layer
        hidden_size   size of one head
        """
        super().__init__()
        self._num_heads = num_heads
        self._eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(num_heads * hidden_size, dtype=config.params_dtype)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x_THd: Tensor) -> Tensor:
        """Normalize this rank's H heads [..., H, d]; several ranks may hold the same KV head."""
        num_local, head_dim = x_THd.shape[-2:]
        rank = ps.get_tensor_model_parallel_rank()
        size = ps.get_tensor_model_parallel_world_size()
        squares_T = x_THd.float().square().sum((-2, -1), keepdim=True)
        if size > 1:
            squares_T = _SumOverRanks.apply(squares_T)
        scale_T = torch.rsqrt(squares_T / (num_local * size * head_dim) + self._eps)
        first = rank * self._num_heads // size
        weight_Hd = self.weight.view(self._num_heads, head_dim)[first : first + num_local]
        return (x_THd.float() * scale_T * weight_Hd.float()).to(x_THd.dtype)


class ValueHead(MegatronModule):
    """Replaces GPTModel.output_layer and takes its arguments; computes in float32.

    Every tensor-parallel rank holds the whole head. Under sequence parallelism each rank computes
    its own tokens, and Megatron sums the gradients of the head over the ranks.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        weight = torch.empty(1, config.hidden_size, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.sequence_parallel = config.sequence_parallel

    def forward(self, hidden_THx: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        """Return values [T, 1, 1] of hidden states [T, 1, hidden].

        Under sequence parallelism the input is this rank's [T / tp, 1, hidden].
        """
        values_T11 = F.linear(hidden_THx.float(), self.weight.float())
        if self.sequence_parallel:
            values_T11 = gather_from_sequence_parallel_region(
                values_T11, tensor_parallel_output_grad=False
            )
        return values_T11, None


class PlainQueries(MLASelfAttention):
    """Latent attention that projects queries at once, without a norm (DeepSeek-V2-Lite, Moonlight).

    megatron-core 0.19.2 puts a norm before that projection if keys and values have one.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        resolved = super()._resolve_qk_norm_config(submodules)
        return {**resolved, "linear_q_proj": submodules.linear_q_proj}


class DeltaNet(GatedDeltaNet):
    """A gated delta net whose decay is computed in float32, as in transformers and in engines.

    megatron-core 0.19.2 takes the exponential of A_log in the model's dtype.
    """

    def _compute_g_and_beta(
        self, A_log_local_cp: Tensor, dt_bias_local_cp: Tensor, alpha: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        decay = -A_log_local_cp.float().exp()
        return decay * F.softplus(alpha.float() + dt_bias_local_cp.float()), beta.sigmoid()


class PlainNorm:
    """The norm of `kind` with its weight as factor in a model whose other norms have 1 + weight."""

    def __new__(
        cls, kind: Any, config: TransformerConfig, hidden_size: int, eps: float
    ) -> torch.nn.Module:
        plain = copy(config)
        plain.layernorm_zero_centered_gamma = False
        return kind(config=plain, hidden_size=hidden_size, eps=eps)


def make_chunks(
    config: TransformerConfig, hf_config: HfConfig, expert_gemm: ExpertGemm = "separate"
) -> list[Chunk]:
    """Return one model chunk per virtual pipeline stage of this rank, parameters uninitialized."""
    stages = range(config.virtual_pipeline_model_parallel_size or 1)
    virtual = config.virtual_pipeline_model_parallel_size is not None
    chunks = [
        _make_chunk(config, hf_config, expert_gemm, stage if virtual else None) for stage in stages
    ]
    _mark_parameters(chunks)
    return chunks


def _make_chunk(
    config: TransformerConfig, hf_config: HfConfig, expert_gemm: ExpertGemm, vp_stage: int | None
) -> Chunk:
    make: Any = make_hybrid_chunk if config.is_hybrid_model else _make_gpt_chunk
    chunk: Chunk = make(config, hf_config, expert_gemm, vp_stage)
    if has_value_head(hf_config) and chunk.post_process:
        chunk.output_layer = ValueHead(config)  # type: ignore[assignment]
    return chunk.cuda()


def _make_gpt_chunk(
    config: TransformerConfig, hf_config: HfConfig, expert_gemm: ExpertGemm, vp_stage: int | None
) -> GPTModel:
    tied = not has_value_head(hf_config) and hf_config.get("tie_word_embeddings", False)
    kind: Any = GPTModel
    if family_of(hf_config).has_tower:
        kind = partial(VisionLanguageModel, hf_config=hf_config)
    spec = _make_spec(config, hf_config, expert_gemm, vp_stage)
    chunk = kind(
        config,
        spec,
        vocab_size=pad_vocab_size(hf_config, config.tensor_model_parallel_size),
        max_sequence_length=hf_config["max_position_embeddings"],
        **rotary_options(hf_config),
        share_embeddings_and_output_weights=tied,
        parallel_output=True,
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        vp_stage=vp_stage,
    )
    num_mtp_layers = hf_config.get(TRAINED, 0)
    if num_mtp_layers and chunk.post_process:
        chunk.mtp = make_mtp_block(config, spec.layer_specs[-1], num_mtp_layers, vp_stage)
    return chunk


def _make_spec(
    config: TransformerConfig, hf_config: HfConfig, expert_gemm: ExpertGemm, vp_stage: int | None
) -> TransformerBlockSubmodules:
    if config.experimental_attention_variant:
        spec = get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage)
    else:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    family = family_of(hf_config)
    sizes = family.sizes(hf_config)
    for layer in spec.layer_specs or ():
        _adapt_delta_net(layer.submodules.self_attention)
        adapt_sparse_attention(layer.submodules.self_attention)
        if sizes.get("deepstack_mergers"):
            layer.module = DeepstackLayer
        if config.multi_latent_attention and config.q_lora_rank is None:  # type: ignore[attr-defined]
            layer.submodules.self_attention.module = PlainQueries
        if sizes.get("q_norm", 0) > sizes.get("head", 0):
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm, attention.k_layernorm = (
                ModuleSpec(ProjectionNorm, params={"num_heads": num_heads})
                for num_heads in (config.num_attention_heads, config.num_query_groups)
            )
        experts: Any = layer.submodules.mlp.keywords["submodules"]  # its builder is a partial
        if isinstance(experts, MoESubmodules):
            experts.router = TokenWeightedRouter
            if family.alternating:
                linears = experts.experts.keywords["submodules"]  # type: ignore[attr-defined]
                linears.linear_fc1 = with_halves(linears.linear_fc1)
            if expert_gemm == "grouped_mm":
                layer.submodules.mlp = use_grouped_products(layer.submodules.mlp)
    return spec


def _adapt_delta_net(attention: ModuleSpec) -> None:
    """Replace the module and the output's norm of a gated delta net; layers share their spec."""
    if attention.module is GatedDeltaNet:
        attention.module = DeltaNet
        norm = attention.submodules.out_norm
        attention.submodules.out_norm = ModuleSpec(PlainNorm, params={"kind": norm})


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
