"""Has Mamba-2 layers of SGLang keep the logarithm of their decay, which a weight sync sends.

    checkpoint        A_log
    SGLang            parameter A = -exp(A_log), computed as A_log is loaded
    here              parameter A = A_log;  -exp(A) is computed as the layer runs

Every slice of a parameter that is synced then holds what a trainer rank sent, so that it can be
compared with it and replaced.
"""

from importlib import import_module
from typing import Any
from weakref import WeakSet

from torch import Tensor

ARCHITECTURES = {"NemotronHForCausalLM"}
"""Architectures with such layers."""


def keep_logarithms() -> None:
    """Let Mamba-2 layers of this process load A_log as it is. They compute the decay of a step.

    This process is to be a scheduler's.
    """
    mamba: Any = import_module("sglang.srt.layers.attention.mamba.mamba")
    assert callable(mamba.composed_weight_loader), "SGLang has another name for it"
    mamba.composed_weight_loader = lambda loader, derive: loader
    make = mamba.MambaMixer2.__init__
    made: WeakSet[Any] = WeakSet()

    def make_layer(layer: Any, *args: Any, **kwargs: Any) -> None:
        make(layer, *args, **kwargs)
        made.add(layer)

    def find_decay(layer: Any) -> Tensor:
        """Return -exp(A_log), float32 [heads of the rank]; the parameter while a layer is made.

        Raises AttributeError while it has none.
        """
        logarithms = layer._parameters.get("A")
        if logarithms is None:
            raise AttributeError("A")
        return -logarithms.float().exp() if layer in made else logarithms

    mamba.MambaMixer2.__init__ = make_layer
    mamba.MambaMixer2.A = property(find_decay)
