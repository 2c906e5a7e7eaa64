"""SGLang without CUDA: the arguments, environment and stand-ins that its server process needs."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.device import leave_compiler_out

STANDINS_DIR = Path(__file__).parent / "standins"
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "served_models",
    "TORCH_COMPILE_DISABLE": "1",
}
CPU_ARGUMENTS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
    "--mem-fraction-static": "0.8",
}
"""The KV cache takes what --max-total-tokens says. The fraction has to leave room for what other processes
take while the engine starts, which SGLang counts as its own.
"""


def use_cpu(arguments: list[str]) -> list[str]:
    """Set this process up for SGLang without CUDA; returns `arguments` with those the CPU needs.

    Call it before anything imports sglang.
    """
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    num_ranks = int(_option(arguments, "--tp-size", "1")) * int(
        _option(arguments, "--pp-size", "1")
    )
    if num_ranks > 1:
        cpus = rank_cpus(num_ranks, sorted(os.sched_getaffinity(0)))
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", cpus)
    leave_compiler_out()
    sys.path.insert(0, str(STANDINS_DIR))
    from sglang_on_cpu import apply_patches  # pyright: ignore[reportMissingImports]

    apply_patches()
    added = [part for item in CPU_ARGUMENTS.items() if item[0] not in arguments for part in item]
    added.append("--disable-hybrid-swa-memory")  # which torch_native's attention would read wrongly
    kept = [
        argument for argument in arguments if argument != "--enable-memory-saver"
    ]  # host memory stays
    return [*kept, *added]


def rank_cpus(num_ranks: int, cpus: Sequence[int]) -> str:
    """Cores of each tensor-parallel rank as SGLang writes them, "0,1|2,3"; with too few, ranks share.

    SGLang asks for it when there are more ranks than NUMA nodes.
    """
    share = max(1, len(cpus) // num_ranks)
    starts = [rank * share % len(cpus) for rank in range(num_ranks)]
    return "|".join(",".join(str(cpu) for cpu in cpus[start : start + share]) for start in starts)


def _option(arguments: Sequence[str], name: str, default: str) -> str:
    return arguments[arguments.index(name) + 1] if name in arguments else default
