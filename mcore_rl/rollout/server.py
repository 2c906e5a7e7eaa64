"""Entry of an SGLang server process: `python -m mcore_rl.rollout.server --parent-pid N <sglang arguments>`.

In: the arguments of `sglang serve`. Out: an HTTP server whose processes all die with the one that started it.
Without CUDA the import stand-ins come first on the path and SGLang is set up for the CPU.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.process.lazy_imports import without_collector

STANDINS_DIR = Path(__file__).parent / "standins"

_PR_SET_PDEATHSIG = 1

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


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when the thread of `parent_pid` that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent died before the line above


def forks_die_with_their_parents() -> None:
    """Call die_with_parent in every process that this one forks, and in those that they fork."""
    forking_pid = 0

    def remember_parent() -> None:
        nonlocal forking_pid
        forking_pid = os.getpid()

    os.register_at_fork(before=remember_parent, after_in_child=lambda: die_with_parent(forking_pid))


def rank_cpus(num_ranks: int, cpus: Sequence[int]) -> str:
    """Cores of each tensor-parallel rank as SGLang writes them, "0,1|2,3"; with too few, ranks share.

    SGLang asks for it when there are more ranks than NUMA nodes.
    """
    share = max(1, len(cpus) // num_ranks)
    starts = [rank * share % len(cpus) for rank in range(num_ranks)]
    return "|".join(",".join(str(cpu) for cpu in cpus[start : start + share]) for start in starts)


def use_cpu(arguments: list[str]) -> list[str]:
    """Set this process up for SGLang without CUDA; returns `arguments` with those the CPU needs.

    Call it before anything imports sglang.
    """
    from mcore_rl.device import leave_compiler_out

    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    num_ranks = int(_option(arguments, "--tp-size", "1")) * int(_option(arguments, "--pp-size", "1"))
    if num_ranks > 1:
        cpus = rank_cpus(num_ranks, sorted(os.sched_getaffinity(0)))
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", cpus)
    leave_compiler_out()
    sys.path.insert(0, str(STANDINS_DIR))
    from sglang_on_cpu import apply_patches  # pyright: ignore[reportMissingImports]

    apply_patches()
    added = [part for item in CPU_ARGUMENTS.items() if item[0] not in arguments for part in item]
    added.append("--disable-hybrid-swa-memory")  # which torch_native's attention would read wrongly
    kept = [argument for argument in arguments if argument != "--enable-memory-saver"]  # host memory stays
    return [*kept, *added]


def _option(arguments: Sequence[str], name: str, default: str) -> str:
    return arguments[arguments.index(name) + 1] if name in arguments else default


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--parent-pid"]:
        die_with_parent(int(arguments[1]))
        arguments = arguments[2:]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, below
    forks_die_with_their_parents()

    if "--is-embedding" in arguments:
        os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "mcore_rl.rollout.reward_heads"
    with without_collector():
        from mcore_rl.device import has_cuda

        if not has_cuda():
            arguments = use_cpu(arguments)
        from sglang.launch_server import run_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__mp_main__":  # a process that multiprocessing spawned from this one
    die_with_parent(os.getppid())
if __name__ == "__main__":
    main(sys.argv[1:])
