"""megatron-core's layer of experts with grouped products, which reads no counts back.

alltoall dispatcher   counts of rows by expert stay on the device; the host still waits for the
                      sizes of messages where ranks exchange tokens
rank with all experts nothing is read; rows, sorted by expert already, are not sorted again
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from mcore_rl.train.experts.grouped_linear import with_grouped_products

ALIGNED_BYTES = 16


@dataclass(frozen=True)
class _Ends:
    """Stands for counts of rows; megatron-core calls `tolist` and gives both layers the result."""

    ends_E: Tensor

    def tolist(self) -> Tensor:
        return self.ends_E


class GroupedExperts(TEGroupedMLP):
    """Two grouped products, and megatron-core's activation between them."""

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
        *buffers: Any,
    ) -> tuple[Tensor, Tensor | None]:
        device = permuted_local_hidden_states.device
        counts_E = tokens_per_expert.to(device, non_blocking=True)
        ends: Any = _Ends(counts_E.cumsum(0, dtype=torch.int32))
        return super().forward(permuted_local_hidden_states, ends, permuted_probs, *buffers)


class DeviceDispatcher(MoEAlltoAllTokenDispatcher):
    """Leaves the counts of rows by expert where they were computed."""

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: TransformerConfig,
        pg_collection: Any,
    ) -> None:
        super().__init__(num_local_experts, list(local_expert_indices), config, pg_collection)
        is_dropless = config.moe_expert_capacity_factor is None and not self.drop_and_pad
        self._has_all_experts = self.ep_size == self.tp_size == 1 and is_dropless
        """The permutation by `dispatch_preprocess` has then sorted all rows by expert."""

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> Any:
        if not self._has_all_experts:
            return super().dispatch_postprocess(global_input_tokens, global_probs)
        counts_E, self.tokens_per_expert = self.tokens_per_expert, None
        return global_input_tokens, counts_E, global_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states if self._has_all_experts else super().combine_preprocess(hidden_states)

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Any:
        if not self._has_all_experts:
            super()._maybe_dtoh_and_synchronize(point)
        return tokens_per_expert


class GroupedLayer(MoELayer):
    """MoELayer with DeviceDispatcher in the place of the alltoall dispatcher."""

    def __init__(
        self, config: TransformerConfig, *args: Any, pg_collection: Any = None, **options: Any
    ) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **options)
        if config.moe_token_dispatcher_type != "alltoall":
            return
        groups = pg_collection or get_default_pg_collection()
        indices = self.local_expert_indices
        self.token_dispatcher = DeviceDispatcher(self.num_local_experts, indices, config, groups)
        if self.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)


def use_grouped_products(mlp: Any) -> Any:
    """Return the builder of a layer of experts with grouped products.

    `mlp` is megatron-core's builder, a partial of MoELayer. A builder made here is returned as it
    is, since layers share their spec.
    """
    if mlp.func is GroupedLayer:
        return mlp
    submodules: MoESubmodules = mlp.keywords["submodules"]
    experts: Any = submodules.experts
    linears: GroupedMLPSubmodules = experts.keywords["submodules"]
    linears.linear_fc1 = with_grouped_products(linears.linear_fc1)  # type: ignore[arg-type]
    linears.linear_fc2 = with_grouped_products(linears.linear_fc2)  # type: ignore[arg-type]
    submodules.experts = partial(GroupedExperts, **experts.keywords)
    return partial(GroupedLayer, **mlp.keywords)


def check_grouped_products(config: TransformerConfig) -> None:
    """Raise ValueError if grouped_mm cannot compute a model's experts; a model may have none."""
    if not config.num_moe_experts:
        return
    remedy = "set train.expert_gemm=separate"
    if config.add_bias_linear:
        raise ValueError(
            "train.expert_gemm=grouped_mm: this model's experts have biases, which grouped"
            f" products leave out; {remedy}"
        )
    if config.fp8 or config.fp4:
        raise ValueError(
            f"train.expert_gemm=grouped_mm with train.megatron.fp8={config.fp8},"
            f" fp4={config.fp4}: torch's grouped products are in bfloat16; {remedy}"
        )
    sizes = (config.hidden_size, config.moe_ffn_hidden_size // config.expert_tensor_parallel_size)
    multiple = ALIGNED_BYTES // config.params_dtype.itemsize
    if any(size % multiple for size in sizes):
        raise ValueError(
            f"train.expert_gemm=grouped_mm: experts of {sizes[0]} x {sizes[1]} on each rank, but"
            f" torch's grouped products take multiples of {multiple}; {remedy}, or a smaller"
            " parallel.etp"
        )
