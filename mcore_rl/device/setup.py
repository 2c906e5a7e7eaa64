"""Prepares a process for megatron-core, with CUDA or without."""

import os
from functools import cache

import torch

from mcore_rl.device import IN_PLACE, has_cuda, has_transformer_engine


def attention_with_sinks(cp_size: int) -> type | None:
    """Return the module for attention with sinks in Transformer Engine's place, or None.

    Transformer Engine before 2.12 has no kernel for sinks over packed sequences, and megatron-core
    0.16.1 takes none later. Raises ValueError if context parallelism cuts sequences: the module
    would keep the scores of all pairs of tokens.
    """
    if not has_cuda():
        return None  # the torch modules of the CPU are in place already
    if cp_size > 1:
        raise ValueError(
            f"parallel.cp={cp_size} with a model whose attention has sinks (gpt-oss): on GPUs that"
            " needs Transformer Engine 2.12, which megatron-core 0.16.1 does not take; set"
            " parallel.cp=1"
        )
    from mcore_rl.cpu.te_workalike import DotProductAttention

    return DotProductAttention


def use_torch_modules_on_cuda() -> None:
    """Let megatron-core run on CUDA without Transformer Engine; call it before `setup_device`.

    The torch modules that take its place on a CPU then take it on the GPU. They are much slower:
    this is for checks on machines where Transformer Engine cannot be installed.
    """
    IN_PLACE.torch_modules = torch.cuda.is_available()


def setup_device() -> None:
    """Make megatron-core usable in this process; call it before a model is built. Idempotent.

    Raises ValueError if CUDA is present but Transformer Engine is not.
    """
    if torch.cuda.is_available() and not IN_PLACE.cpu_patches:
        if IN_PLACE.torch_modules:
            _install_torch_modules()
        else:
            _prepare_transformer_engine()
        # With a single hardware queue no collective overtakes the kernel queued before it; tensor
        # parallelism relies on that order.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    else:
        _install_cpu_patches()
    from mcore_rl.device.training_patches import keep_write_results_in_process

    keep_write_results_in_process()


@cache
def _prepare_transformer_engine() -> None:
    if not has_transformer_engine():
        raise ValueError(
            "CUDA is present but transformer_engine is not: pip install 'mcore_rl[gpu]'"
        )
    from mcore_rl.device.training_patches import use_adam_in_parts

    use_adam_in_parts()


@cache
def _install_torch_modules() -> None:
    from mcore_rl.cpu.megatron_patches import WITHOUT_TRANSFORMER_ENGINE

    for patch in WITHOUT_TRANSFORMER_ENGINE:
        patch()


def _install_cpu_patches() -> None:
    if IN_PLACE.cpu_patches:
        return
    from mcore_rl.cpu.host_allocator import keep_freed_memory
    from mcore_rl.cpu.kernel_patches import KERNEL_PATCHES
    from mcore_rl.cpu.megatron_patches import PATCHES

    keep_freed_memory()
    for patch in (*PATCHES, *KERNEL_PATCHES):
        patch()
    IN_PLACE.cpu_patches = True
