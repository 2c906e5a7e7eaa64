"""Experts whose first linear layer has gate and up row by row in turn, as gpt-oss has it."""

from functools import cache
from typing import Any

from torch import Tensor


class _Alternating:
    """Marks the classes made below."""


@cache
def with_halves(linear: type) -> type:
    """The class `linear`, of an expert's linear_fc1, with an output that has all of the gate first.

    megatron-core's activation takes halves. To hold the rows themselves in that order would make every row of
    the HF tensor a slice of its own. A class made here is returned as it is, since layers share their spec.
    """
    if issubclass(linear, _Alternating):
        return linear

    class AlternatingLinear(_Alternating, linear):
        def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
            out, bias = super().forward(*args, **kwargs)
            assert bias is None, (
                "the bias belongs to the rows as they are: it has to be added before"
            )
            return out.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), None

    return AlternatingLinear
