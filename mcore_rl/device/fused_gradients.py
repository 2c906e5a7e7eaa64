"""Gives megatron-core, without apex, the kernel that adds a weight's gradient to its sum.

    sum_NK += grad_TN^T @ inputs_TK        one matrix product, instead of a product and an addition

megatron-core's own layers, such as the output layer, take it from an extension of apex. Transformer
Engine has the same product; its own layers use it once megatron-core's option is on.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor

from mcore_rl.device import has_transformer_engine

_EXTENSION = "fused_weight_gradient_mlp_cuda"


def give_megatron_fused_gradients() -> None:
    """Let Transformer Engine's product take the place of apex's, where that is not installed.

    Call it before megatron-core is imported.
    """
    if not has_transformer_engine() or _EXTENSION in sys.modules or find_spec(_EXTENSION):
        return
    module = ModuleType(_EXTENSION, "apex's kernels, by Transformer Engine.")
    module.__spec__ = ModuleSpec(_EXTENSION, None)
    kernels = {"wgrad_gemm_accum_fp32": add_product, "wgrad_gemm_accum_fp16": add_product}
    vars(module).update(kernels)
    sys.modules["fused_weight_gradient_mlp_cuda"] = module


def add_product(inputs_TK: Tensor, grad_TN: Tensor, sum_NK: Tensor) -> None:
    """Add the gradient of a weight [N, K] to `sum_NK`, in the precision of the sum."""
    from transformer_engine.pytorch.cpp_extensions import (  # type: ignore[import-not-found]
        general_gemm,
    )

    general_gemm(
        inputs_TK,
        grad_TN,
        out_dtype=sum_NK.dtype,
        layout="NT",
        out=sum_NK,
        grad=True,
        accumulate=True,
    )
