"""The one place that knows CUDA from CPU: devices, process-group backends, and patches for the CPU.

Without CUDA, `setup_device()` (setup.py) patches megatron-core to run on CPU tensors over gloo.
Transformer Engine is replaced by torch modules with the same module tree and parameter names.
Nothing above this package needs a CPU variant; docs/patches.md lists every patch, docs/cpu.md every
stand-in.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from mcore_rl.device.environment import local_indices

_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_PINNED_THRESHOLD = "pinned_max_round_threshold_mb"
_FIRST_WITH_THRESHOLD = (2, 13)
"""An older torch refuses the setting at its first allocation, which ends the process."""
_EXACT_FROM_MIB = 64
"""Smaller pinned blocks are rounded up to powers of two, which lets torch use them again."""
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
}
"""Part of a GPU's name -> dense bfloat16 operations per second, from NVIDIA's data sheets."""
_PINNED: list[torch.Tensor] = []
"""Memory that `pin_in_place` has pinned."""
HOST_RNG = "torch"
GPU_RNG = "cuda"


@dataclass
class InPlace:
    """Says what setup.py has put in place in this process.

    cpu_patches     megatron-core's patches for the CPU
    torch_modules   torch modules, instead of Transformer Engine's, also on CUDA
    """

    cpu_patches: bool = False
    torch_modules: bool = False


IN_PLACE = InPlace()


def has_cuda() -> bool:
    return torch.cuda.is_available() and not IN_PLACE.cpu_patches


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed."""
    return find_spec("transformer_engine") is not None


def device() -> torch.device:
    """Return the device of this rank's parameters: the current CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def describe_device() -> dict[str, str]:
    """Return name and memory of this process's device, and the versions that drive it."""
    described = {"device": "CPU", "torch": torch.__version__}
    if has_cuda():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        memory_gib = f"{properties.total_memory / 2**30:.0f} GiB"
        described |= {
            "device": f"{properties.name}, {memory_gib}",
            "cuda": torch.version.cuda or "",
        }
    return described


def dist_backend() -> str:
    """Return the torch.distributed backend of the training ranks' process groups."""
    return "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"


def set_local_device(rank: int, gpu_ids: Sequence[str] = ()) -> None:
    """Bind this process to one GPU of its node; do nothing on a CPU.

    It is the one in `gpu_ids`, named as in CUDA_VISIBLE_DEVICES. Without, ranks take GPUs in turn.
    """
    if has_cuda():
        own = local_indices(gpu_ids, os.environ) or [rank % torch.cuda.device_count()]
        assert len(own) == 1, f"rank {rank} was given the GPUs {list(gpu_ids)}, but uses one"
        torch.cuda.set_device(own[0])


def can_pin_exactly() -> bool:
    """Return whether this torch has the setting by which large blocks are pinned exactly."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= _FIRST_WITH_THRESHOLD


def exact_pinning(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that lets torch pin large blocks at their exact size.

    By default it takes the next power of two, so offloaded state could take twice its size. Set it
    before torch allocates. A threshold that `environ` has already stays. Nothing is returned where
    torch is older than 2.13, which does not know the setting.
    """
    if not can_pin_exactly():
        return {}
    name = next((name for name in _ALLOCATOR_SETTINGS if name in environ), _ALLOCATOR_SETTINGS[0])
    settings = [setting for setting in environ.get(name, "").split(",") if setting]
    if not any(setting.startswith(f"{_PINNED_THRESHOLD}:") for setting in settings):
        settings.append(f"{_PINNED_THRESHOLD}:{_EXACT_FROM_MIB}")
    return {name: ",".join(settings)}


def synchronize() -> None:
    """Wait for the device's queued work. Call it before reading a copy on the host or a clock."""
    if has_cuda():
        torch.cuda.synchronize()


def peak_flops() -> float | None:
    """Return the dense bfloat16 operations per second of this GPU's data sheet; None if unknown."""
    name = device_name()
    return next((flops for known, flops in PEAK_FLOPS.items() if known in name), None)


def device_name() -> str:
    """Return the name of this process's GPU, such as "NVIDIA H100 80GB HBM3"; "cpu" without one."""
    if not has_cuda():
        return "cpu"
    return torch.cuda.get_device_properties(torch.cuda.current_device()).name


def peak_bytes() -> int:
    """Return the most bytes that tensors of this process held on the GPU at once; 0 on a CPU.

    Counts from the start of the process, or from the last `forget_peak`.
    """
    return torch.cuda.max_memory_allocated() if has_cuda() else 0


def forget_peak() -> None:
    """Let `peak_bytes` count from zero again."""
    if has_cuda():
        torch.cuda.reset_peak_memory_stats()


def host_memory(num_bytes: int) -> torch.Tensor:
    """Return uninitialized uint8 host memory, pinned on CUDA so that copies are asynchronous."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=has_cuda())


def pin_in_place(memory_B: torch.Tensor) -> None:
    """Pin host memory that torch did not allocate, on CUDA: copies are then asynchronous and fast.

    It stays pinned until `unpin_all`, and must not be unmapped before. Where the system refuses,
    copies are slower.
    """
    if has_cuda():
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostRegister(memory_B.data_ptr(), memory_B.nbytes, 0)
        _PINNED.append(memory_B)


def unpin_all() -> None:
    """Unpin what `pin_in_place` has pinned; no copy may be under way."""
    runtime: Any = torch.cuda.cudart() if _PINNED else None
    while _PINNED:
        memory_B = _PINNED.pop()  # mapped until it is unpinned
        runtime.cudaHostUnregister(memory_B.data_ptr())


def on_device(value: torch.Tensor) -> torch.Tensor:
    """Return a host tensor's copy on the device, made without waiting; the tensor itself on a CPU.

    It may be freed at once: torch keeps its pinned memory until the copy has run.
    """
    return value.pin_memory().to(device(), non_blocking=True) if has_cuda() else value


def to_host(value: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory without waiting for it; read it after `synchronize`.

    On a CPU it is the tensor itself.
    """
    if not has_cuda():
        return value
    return allocate_pinned_like(value).copy_(value, non_blocking=True)


def allocate_pinned_like(value: torch.Tensor) -> torch.Tensor:
    """Return uninitialized host memory for a tensor's values, pinned on CUDA."""
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=has_cuda())


def default_generators() -> dict[str, torch.Generator]:
    """Return the generators that torch's random functions use if they are given none.

    By name: HOST_RNG and, with CUDA, GPU_RNG, which is the current device's. Without CUDA there is
    one: `alias_rng` in cpu/megatron_patches.py hands megatron-core the host's for both.
    """
    generators = {HOST_RNG: torch.default_generator}
    if has_cuda():
        torch.cuda.init()  # the generators of GPUs exist from here on
        generators[GPU_RNG] = torch.cuda.default_generators[torch.cuda.current_device()]
    return generators


def empty_cache() -> None:
    """Return cached, unused memory to the device, where another process may take it."""
    if has_cuda():
        torch.cuda.empty_cache()


def leave_compiler_out() -> None:
    """Without CUDA, make `torch.compile` return functions unchanged; nothing is compiled there.

    Call it before megatron-core or SGLang is imported. Their decorators would import torch's
    compiler, which adds a second to the start of each process. So would functions that tell the
    compiler to leave them alone, such as an optimizer's.
    """
    if has_cuda():
        return
    untyped_torch: Any = torch
    untyped_torch.compile = _return_unchanged
    untyped_torch.compiler.disable = _return_unchanged
    for method in vars(torch.optim.Optimizer).values():
        function = getattr(method, "__wrapped__", None)
        if method is not function and function is not None:
            # torch/_compile.py calls this instead of asking torch._dynamo for one.
            vars(function).setdefault("__dynamo_disable", function)


def _return_unchanged(model: Any = None, *_: Any, **__: Any) -> Any:
    return (lambda function: function) if model is None else model


def megatron_options() -> dict[str, Any]:
    """Return the TransformerConfig options that choose fused CUDA kernels or plain torch.

    With fused kernels, gradients of weights are added to the float32 buffer by the product that
    computes them; see fused_gradients.py for megatron-core's own layers.
    """
    fused = has_cuda() and not IN_PLACE.torch_modules
    return {
        "apply_rope_fusion": fused,
        "moe_permute_fusion": fused,
        "bias_activation_fusion": not IN_PLACE.torch_modules,
        "persist_layer_norm": fused,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": fused,
    }
