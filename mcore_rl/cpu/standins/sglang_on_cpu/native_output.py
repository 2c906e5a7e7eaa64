"""The output layer's product in compiled code, for the few rows of a decode step."""

import ctypes
from typing import Any

import torch
from torch import Tensor


class NativeOutput:
    """Replaces `_compute_lm_head` of SGLang's LogitsProcessor, which gets what it does not take.

    torch's library copies the weights into an order of its own at each product: a third of a
    decode step of SmolLM2.
    """

    def __init__(self, processor: Any, library: ctypes.CDLL, sgemm: Any, shape: Any) -> None:
        self.in_torch = processor._compute_lm_head
        self._call = library.output_layer
        self._call.restype = None
        self._most_rows = ctypes.c_int64.in_dll(library, "most_output_rows").value
        self._sgemm = sgemm
        self._shape = shape

    def __call__(
        self,
        hidden_states: Tensor,
        lm_head: Any,
        embedding_bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        weight = lm_head.weight
        if len(hidden_states) > self._most_rows or not are_plain(hidden_states, weight):
            return self.in_torch(hidden_states, lm_head, embedding_bias, out=out)
        logits = torch.empty(len(hidden_states), len(weight))
        self._call(
            self._sgemm,
            ctypes.byref(self._shape),
            *map(ctypes.c_int64, (len(hidden_states), *weight.shape)),
            *(ctypes.c_void_p(x.data_ptr()) for x in (hidden_states, weight, logits)),
        )
        return logits


def are_plain(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether compiled code reads both matrices as they lie in memory."""
    plain = all(x.dtype == torch.float32 and x.is_contiguous() for x in (hidden, weight))
    return plain and hidden.dim() == 2
