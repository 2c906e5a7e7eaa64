"""Prepares a process for megatron-core, with CUDA or without."""

import os
import sys
import typing
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import typing_extensions

from mcore_rl.device import IN_PLACE, has_transformer_engine
from mcore_rl.device.deep_ep import give_megatron_deep_ep
from mcore_rl.device.environment import choose_queues
from mcore_rl.device.fused_gradients import give_megatron_fused_gradients
from mcore_rl.process.folders import INDUCTOR, find_compile_caches

_PAGED_STASH = ("GLOBAL_BLOCK_SIZE", "paged_stash_copy_kernel", "paged_stash_pop_kernel")
"""Names that megatron-core imports from its module of kernels."""
_SYRK = ("tsyrk_ex", "tsyrk_ex_small_matrix", "HAS_TRITON_340")
"""Names that megatron-core's Muon imports from its module of kernels."""

_load_from_bytes = torch.storage._load_from_bytes


def keep_torch_pickles() -> None:
    """Let tensors be pickled as torch does; call it once megatron-core is imported.

    megatron-core puts a function of its own into torch, whose name then stands in each pickle of a
    tensor. Who reads one would have to import megatron-core, and SGLang refuses the name.
    """
    torch.storage._load_from_bytes = _load_from_bytes


def keep_absl_from_the_root_logger() -> None:
    """Let absl log as others do; megatron-core's optimizers log by it, when they are imported.

    absl would give the root logger a handler, which prints all messages as they are: those of a run
    are to be read in its log, without secrets.
    """
    from absl import logging as absl_logging
    from absl.logging.converter import absl_to_standard

    def log(level: int, msg: object, *args: object, **kwargs: Any) -> None:
        absl_logging.get_absl_logger().log(absl_to_standard(level), msg, *args, **kwargs)

    absl_logging.log = log


def let_megatron_import() -> None:
    """Let megatron-core be imported as it is; call it before that.

    All of megatron-core imports Triton kernels for the paged stash of experts' activations and for
    Muon. Without Triton, empty modules take the place of theirs. Its optimizers import a decorator
    that Python has since 3.12. For DeepEP see deep_ep.py.
    Nobody is warned that Transformer Engine and apex are missing: `setup_device` refuses a GPU
    without the first, and the second is never needed.
    """
    warnings.filterwarnings(
        "ignore", r"(Transformer Engine and )?Apex (is|are) not installed", module=r"megatron\."
    )
    keep_absl_from_the_root_logger()
    give_megatron_deep_ep()
    give_megatron_fused_gradients()
    if sys.version_info < (3, 12):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    name = "megatron.core.transformer.moe.ops.paged_stash"
    if name not in sys.modules and find_spec("triton") is None:
        sys.modules["megatron.core.transformer.moe.ops.paged_stash"] = _make_module(
            name, _PAGED_STASH
        )
        syrk = "emerging_optimizers.triton_kernels.syrk"
        sys.modules["emerging_optimizers.triton_kernels.syrk"] = _make_module(syrk, _SYRK)


def _make_module(name: str, kernels: Sequence[str]) -> ModuleType:
    module = ModuleType(name, "Kernels that are missing, as Triton is.")
    vars(module).update(dict.fromkeys(kernels))
    return module


def use_torch_modules_on_cuda() -> None:
    """Let megatron-core run on CUDA without Transformer Engine; call it before `setup_device`.

    The torch modules that take its place on a CPU then take it on the GPU. They are much slower:
    this is for checks on machines where Transformer Engine cannot be installed.
    """
    IN_PLACE.torch_modules = torch.cuda.is_available()


def setup_device(tp: int = 1) -> None:
    """Make megatron-core usable in this process; call it before a model is built. Idempotent.

    tp   tensor-parallel size of the layers

    Raises ValueError if CUDA is present but Transformer Engine is not.
    """
    let_megatron_import()
    if torch.cuda.is_available() and not IN_PLACE.cpu_patches:
        if IN_PLACE.torch_modules:
            _install_torch_modules()
        else:
            _prepare_transformer_engine()
        for name, value in choose_queues(tp).items():
            os.environ.setdefault(name, value)
        # A killed rank leaves torch's lock on what it was compiling, for which others would wait
        # without end. So the ranks of a node, which have one parent, share a folder with nobody.
        caches = find_compile_caches()
        cache = Path(caches.get(INDUCTOR) or os.environ[INDUCTOR])
        os.environ["TORCH_EXTENSIONS_DIR"] = str(cache / f"extensions_{os.getppid()}")
    else:
        _install_cpu_patches()
    from mcore_rl.device.training_patches import keep_write_results_in_process

    keep_write_results_in_process()


@cache
def _prepare_transformer_engine() -> None:
    if not has_transformer_engine():
        raise ValueError(
            "CUDA is present but transformer_engine is not: make te-wheel builds it for this torch"
            " (docs/install.md)"
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
