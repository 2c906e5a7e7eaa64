"""Sets up SGLang's server process: on which GPUs, or how without CUDA.

Without CUDA it needs other arguments and environment variables, and stand-ins.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from mcore_rl.device import leave_compiler_out
from mcore_rl.device.environment import local_indices, refuse_fixed_graphs

STANDINS_DIR = Path(__file__).parents[1] / "cpu" / "standins"
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "served_models",
    "TORCH_COMPILE_DISABLE": "1",
}
CPU_FLAGS = ("--disable-hybrid-swa-memory", "--disable-overlap-schedule")
"""The first, because torch_native's attention would read the separate memory of sliding-window
layers wrongly. The second, because without a GPU nothing is computed beside the scheduler: what
lets it run ahead only takes time, and computes a step too many for each request.
"""
CPU_ARGUMENTS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
    "--lora-backend": "torch_native",
    "--mem-fraction-static": "0.8",
}
"""--max-total-tokens decides the size of the KV cache. The memory fraction only has to leave room
for other processes that allocate while the engine starts; SGLang counts their memory as its own.
"""


def use_gpus(arguments: list[str], gpu_ids: Sequence[str]) -> list[str]:
    """Return the arguments of a server whose ranks use these GPUs of its machine.

    `gpu_ids` are named as in CUDA_VISIBLE_DEVICES. SGLang counts from a first GPU. If they do not
    follow one another, the server's processes see them first, and then all others, so that they can
    read the memory of trainer ranks there.

    Raises ValueError if the environment asks for graphs that SGLang cannot release.
    """
    refuse_fixed_graphs(arguments, os.environ)
    indices = sorted(local_indices(gpu_ids, os.environ))
    if not indices:
        return arguments
    if indices == list(range(indices[0], indices[0] + len(indices))):
        return [*arguments, "--base-gpu-id", str(indices[0])]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    own = [names[index] for index in indices]
    others = [name for name in names if name not in own]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([*own, *others])  # for processes that it starts
    return arguments


def use_cpu(arguments: list[str], *, compiled: bool = True) -> list[str]:
    """Set this process up for SGLang without CUDA and return `cpu_arguments(arguments)`.

    Call it before anything imports sglang.

    compiled   run what device/native has in compiled code, if there is a compiler
    """
    if not compiled:
        os.environ["CC"] = "none"
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    tp_size = int(_option(arguments, "--tp-size", "1"))
    pp_size = int(_option(arguments, "--pp-size", "1"))
    num_ranks = tp_size * pp_size
    if num_ranks > 1:
        cpus = rank_cpus(num_ranks, sorted(os.sched_getaffinity(0)))
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", cpus)
    leave_compiler_out()
    if str(STANDINS_DIR) not in sys.path:
        sys.path.insert(0, str(STANDINS_DIR))
    from sglang_on_cpu import apply_patches  # pyright: ignore[reportMissingImports]

    apply_patches()
    return cpu_arguments(arguments)


def cpu_arguments(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` with those a CPU needs; an option that is given keeps its value.

    --enable-memory-saver is dropped: it frees GPU memory between rollouts, and host memory stays
    allocated.
    """
    complete = [argument for argument in arguments if argument != "--enable-memory-saver"]
    for name, value in CPU_ARGUMENTS.items():
        if name not in arguments:
            complete += [name, value]
    return complete + [flag for flag in CPU_FLAGS if flag not in arguments]


def rank_cpus(num_ranks: int, cpus: Sequence[int]) -> str:
    """Return each rank's cores in SGLang's notation, "0,1|2,3"; with too few cores, ranks share.

    SGLang requires this setting when there are more ranks than NUMA nodes.
    """
    share = max(1, len(cpus) // num_ranks)
    starts = [rank * share % len(cpus) for rank in range(num_ranks)]
    shares = [cpus[start : start + share] for start in starts]
    return "|".join(",".join(map(str, cpus_of_rank)) for cpus_of_rank in shares)


def _option(arguments: Sequence[str], name: str, default: str) -> str:
    return arguments[arguments.index(name) + 1] if name in arguments else default
