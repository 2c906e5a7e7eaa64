"""Gives megatron-core the DeepEP that SGLang's package `sgl-deep-ep` brings.

megatron-core takes `EventOverlap` from `deep_ep.utils`, where DeepEP's own releases have it. In
SGLang's package it lies one level higher, and megatron-core would believe that DeepEP is missing.
The package also asserts, when it is imported, that there is one NCCL in the process, which would
end any rank that imports megatron-core.
"""

import sys
from importlib import import_module
from importlib.util import find_spec

MISSING = "DeepEP is not installed here (see the Dockerfile)"
_faults: dict[str, str] = {}


def give_megatron_deep_ep() -> None:
    """Import DeepEP as megatron-core will; if it cannot be, let megatron-core do without it."""
    if "deep_ep" in sys.modules or find_spec("deep_ep") is None:
        return
    try:
        package, utils = import_module("deep_ep"), import_module("deep_ep.utils")
        if not hasattr(utils, "EventOverlap"):
            utils.EventOverlap = package.EventOverlap  # type: ignore[attr-defined]
    except Exception as error:  # its checks assert, its JIT asks for CUDA's compiler
        reason = str(error) or type(error).__name__
        _faults["deep_ep"] = f"DeepEP cannot be imported here: {reason.splitlines()[0]}"
        sys.modules["deep_ep"] = None  # type: ignore[assignment]


def find_deep_ep_fault() -> str:
    """Return why megatron-core cannot send tokens by DeepEP; "" if it can."""
    if "deep_ep" in _faults:
        return _faults["deep_ep"]
    return "" if sys.modules.get("deep_ep") is not None else MISSING


def holds_peers() -> bool:
    """Return whether DeepEP maps memory of other ranks, which it gives up only together with them.

    Its buffers lie in a module of megatron-core.
    """
    module = sys.modules.get("megatron.core.transformer.moe.fused_a2a")
    buffers = (getattr(module, name, None) for name in ("_buffer", "_hybrid_ep_buffer"))
    return any(buffer is not None for buffer in buffers)
