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
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from torch import Tensor, autograd, stack
from torch.nn.functional import grouped_mm


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
