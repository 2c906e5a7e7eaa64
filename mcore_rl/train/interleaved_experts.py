"""Experts whose first linear layer alternates gate and up rows, as in gpt-oss.

linear_fc1 gives   g0 u0 g1 u1 g2 u2     (the rows of the HF tensor)
the activation     g0 g1 g2 u0 u1 u2     (what megatron-core expects)
"""

from functools import cache
from typing import Any

from torch import Tensor


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
