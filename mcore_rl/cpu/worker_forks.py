"""Imports what workers import, once, and forks Ray's workers from there; without CUDA only.

    command   |- imports of the controller -|- Ray ...............|
    this      |- torch, Megatron -----------| o- trainer rank 0
                                            | o- trainer rank 1   o: fork, asked for by
                                            | o- collector           worker_setup.py

Where there is a GPU this process ends before it has forked, and workers are started as Ray starts
them.
"""

import runpy
import sys
from contextlib import AbstractContextManager
from importlib import import_module

from mcore_rl.cluster.worker_setup import FORKS
from mcore_rl.cpu.fork_server import fork_server, serve_forks

MODULES = (
    "mcore_rl.agents.images",
    "mcore_rl.batches.sample_store",
    "mcore_rl.planning.slots",
    "mcore_rl.process.http",
    "mcore_rl.rewards.make",
    "mcore_rl.rollout.collector",
    "mcore_rl.train.actor",
    "mcore_rl.train.runtime",
    "mcore_rl.workers.collector_worker",
    "mcore_rl.workers.engine_worker",
    "mcore_rl.workers.model_worker",
)
"""Modules for workers: none imports Ray, which reads its settings from the environment then."""


def worker_forks() -> AbstractContextManager[None]:
    """Run the process during the block; workers of this process find its socket."""
    return fork_server(FORKS, __name__)


def main(arguments: list[str]) -> None:
    """Import, then run the requested script in each fork."""
    request = serve_forks(arguments, _import_all)
    if request is not None:
        runpy.run_path(request.command[0], run_name="__main__")


def _import_all() -> bool:
    """Import what workers need; return False, having imported little, if there is a GPU."""
    from mcore_rl.data.tokenizer import import_auto_tokenizer
    from mcore_rl.device import has_cuda, leave_compiler_out

    if has_cuda():
        return False
    leave_compiler_out()
    import_auto_tokenizer()
    for module in MODULES:
        import_module(module)
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
