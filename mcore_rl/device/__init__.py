"""The one place that knows CUDA from CPU: which device and backend, and what megatron-core needs where CUDA
is absent.

Without CUDA `setup_device()` patches megatron-core to run on CPU tensors over gloo and puts torch modules
with Transformer Engine's module tree and parameter names in its place, so that nothing above this package
has a CPU variant.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch

_cpu_patches_installed = False


def has_cuda() -> bool:
    return torch.cuda.is_available() and not _cpu_patches_installed


def device() -> torch.device:
    """Where this rank's parameters live; on CUDA the current device."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def dist_backend() -> str:
    """Backend of the training ranks' process groups."""
    return "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"


def set_local_device(local_rank: int) -> None:
    """Bind this process to one GPU of its node; on CPU there is nothing to bind."""
    if has_cuda():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


def environment_of(gpu_ids: Sequence[str]) -> dict[str, str]:
    """What a process must find in its environment to see these GPUs of its node, and no others."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpu_ids)} if gpu_ids else {}


def synchronize() -> None:
    """Wait for the device's queued work, so that host copies and clocks are right."""
    if has_cuda():
        torch.cuda.synchronize()


def host_memory(num_bytes: int) -> torch.Tensor:
    """uint8, uninitialised, from which and to which copies are asynchronous."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=has_cuda())


def empty_cache() -> None:
    """Give memory that no tensor has back to the device, where another process may take it."""
    if has_cuda():
        torch.cuda.empty_cache()


def leave_compiler_out() -> None:
    """Without CUDA, where nothing is compiled anyway, have `torch.compile` give functions back as they are.

    Call it before megatron-core or SGLang is imported: their decorators would import torch's compiler,
    a second of each process's start.
    """
    if not has_cuda():
        own_torch: Any = torch
        own_torch.compile = _as_it_is


def _as_it_is(model: Any = None, **_: Any) -> Any:
    return (lambda function: function) if model is None else model


def megatron_options() -> dict[str, Any]:
    """Options of megatron-core's TransformerConfig that choose between fused CUDA kernels and plain torch."""
    fused = has_cuda()
    return {
        "apply_rope_fusion": fused,
        "moe_permute_fusion": fused,
        "bias_activation_fusion": fused,
        "persist_layer_norm": fused,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
    }


def setup_device() -> None:
    """Make megatron-core usable in this process; call it before a model is built. Idempotent.

    Raises ValueError where CUDA is present but Transformer Engine is not.
    """
    if torch.cuda.is_available() and not _cpu_patches_installed:
        _require_transformer_engine()
        # One queue: no collective may overtake the kernel before it, on which tensor parallelism relies.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    else:
        _install_cpu_patches()
    from mcore_rl.device.checkpoint_io import keep_write_results_in_process

    keep_write_results_in_process()


def _require_transformer_engine() -> None:
    from importlib.util import find_spec

    if find_spec("transformer_engine") is None:
        raise ValueError(
            "CUDA is present but transformer_engine is not: pip install 'mcore_rl[gpu]'"
        )


def _install_cpu_patches() -> None:
    global _cpu_patches_installed
    if _cpu_patches_installed:
        return
    from mcore_rl.device.cpu_patches import PATCHES

    for patch in PATCHES.values():
        patch()
    _cpu_patches_installed = True
