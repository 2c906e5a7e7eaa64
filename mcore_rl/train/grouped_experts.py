"""Computes the products of all experts of a layer at once, by torch's grouped_mm.

    rows_MK, sorted by expert   0 0 0 1 3 3     ends_E  3 4 4 6   on the device
    forward     out_MN      = rows_MK x weights_ENK^T      one launch
    backward    drows_MK    = dout_MN x weights_ENK        one launch
                dweights_ENK = dout_MN^T x rows_MK         one launch, one that adds it to its sum

The layers are made from Transformer Engine's, or from their work-alikes: parameters, their names
and their shards are the same. Those launch a product for each expert, 96 in forward and backward
for 32 experts, and take the counts of rows from the host. megatron-core 0.19.2 has one more way,
Transformer Engine's op fuser: for gated activations it is refused unless Transformer Engine's
kernels for Blackwell are on, and one grouped product on Hopper needs a cuBLAS newer than torch's.

No row is added: torch asks for multiples of 16 bytes where groups are cut along the axis whose
elements lie side by side (GroupMMCommon.cuh), and these layouts cut along the other.

The layer of experts is megatron-core's, and reads no counts back:

    alltoall dispatcher   counts of rows by expert stay on the device; the host still waits for the
                          sizes of messages where ranks exchange tokens
    rank with all experts nothing is read; rows, sorted by expert already, are not sorted again
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor, autograd, stack
from torch.nn.functional import grouped_mm

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


class _Grouped:
    """Marks the classes that `with_grouped_products` makes."""


@cache
def with_grouped_products(linear: type) -> type:
    """Return a subclass of a grouped linear layer's class that takes ends of rows, not counts.

    A class made here is returned unchanged, since layers share their spec. The layer's weights have
    sizes in whole multiples of 16 bytes, and no bias.
    """
    if issubclass(linear, _Grouped):
        return linear

    class GroupedLinear(_Grouped, linear):
        def __init__(self, *sizes: int, **options: Any) -> None:
            super().__init__(*sizes, **options)
            # megatron-core's buffers begin with the last parameter. `view_as_one` needs the first
            # expert first.
            for name in reversed(list(self._parameters)):
                self._parameters[name] = self._parameters.pop(name)

        def forward(self, rows_MK: Tensor, ends_E: Tensor) -> tuple[Tensor, None]:
            weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
            adds = self.config.gradient_accumulation_fusion
            return multiply_by_expert(rows_MK, weights, ends_E, adds), None

    return GroupedLinear


def multiply_by_expert(
    rows_MK: Tensor, weights: Sequence[Tensor], ends_E: Tensor, adds: bool = False
) -> Tensor:
    """Return [M, N]: rows, sorted by expert, times the weight [N, K] of their expert, transposed.

    ends_E   int32: where each expert's rows end
    adds     add gradients of weights to `main_grad`, where those of all experts lie side by side,
             and say so by `grad_added_to_main_grad`, as megatron-core's own layers do. The product
             is rounded to the precision of the weights before it is added.
    """
    return _Product.apply(rows_MK, ends_E, adds, *weights)


def view_as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return contiguous tensors of one shape as one [E, ...], without a copy.

    Returns None unless they lie in one storage, in this order and at equal distances.
    """
    first = tensors[0]
    size = first.numel()
    starts = [tensor.storage_offset() for tensor in tensors]
    step = starts[1] - starts[0] if len(tensors) > 1 else size
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    is_even = all(b - a == step for a, b in pairwise(starts))
    if len(storages) > 1 or step < size or not is_even:
        return None
    if not all(tensor.is_contiguous() for tensor in tensors):
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()), starts[0])


class _Product(autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MK: Tensor, ends_E: Tensor, adds: bool, *weights: Tensor) -> Tensor:
        rows_MK = rows_MK.contiguous()
        ctx.save_for_backward(rows_MK, ends_E)
        ctx.weights, ctx.adds = weights, adds
        return _multiply(rows_MK, _join(weights).transpose(1, 2), ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows_MK, ends_E = ctx.saved_tensors
        dout_MN = grads[0].contiguous()
        drows_MK = None
        if ctx.needs_input_grad[0]:
            drows_MK = _multiply(dout_MN, _join(ctx.weights), ends_E)
        is_trained = ctx.needs_input_grad[3:]
        if not any(is_trained):
            return drows_MK, None, None, *[None] * len(ctx.weights)
        dweights_ENK = _multiply(dout_MN.t(), rows_MK, ends_E)
        if ctx.adds and all(is_trained):
            _add_to_sums(ctx.weights, dweights_ENK)
        return drows_MK, None, None, *dweights_ENK.unbind()


def _multiply(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    if a.numel():
        return grouped_mm(a, b, offs=ends_E)
    # This rank's experts got no tokens, and kernels want some.
    return (
        a.new_zeros(0, b.shape[2]) if b.dim() == 3 else a.new_zeros(len(ends_E), len(a), b.shape[1])
    )


def _join(weights: Sequence[Tensor]) -> Tensor:
    joined = view_as_one(weights)
    return stack(tuple(weights)) if joined is None else joined


def _add_to_sums(weights: Sequence[Any], dweights_ENK: Tensor) -> None:
    sums_ENK = view_as_one([weight.main_grad for weight in weights])
    if sums_ENK is None:
        return
    sums_ENK.add_(dweights_ENK)
    for weight in weights:
        weight.grad_added_to_main_grad = True
