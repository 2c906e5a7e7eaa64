"""Imports SGLang, once, and forks the servers of engines from there; without CUDA only.

    command   |- imports of the controller -|- Ray ...|
    this      |- SGLang ------------------------------| o- engine 0   o: fork, asked for by
                                                      | o- engine 1      server_process.py

Where there is a GPU this process ends before it has forked, and servers are started one by one.
"""

import os
import sys
from contextlib import AbstractContextManager

from mcore_rl.cpu.fork_server import fork_server, serve_forks
from mcore_rl.process.cores import THREADS
from mcore_rl.process.server_keys import KEYS_FD
from mcore_rl.rollout.engine import FORKS, SERVER


def engine_forks() -> AbstractContextManager[None]:
    """Run the process during the block; code that starts engines finds its socket."""
    return fork_server(FORKS, __name__)


def main(arguments: list[str]) -> None:
    """Import, then serve in each fork."""
    request = serve_forks(arguments, _import_all)
    if request is None:
        return
    import torch
    from setproctitle import setproctitle

    from mcore_rl.rollout.server import serve

    torch.set_num_threads(int(os.environ.setdefault(THREADS, "1")))
    setproctitle(" ".join([sys.executable, *request.command]))
    sys.argv = sys.argv[len(SERVER) - 1 :]
    keys = [KEYS_FD, str(request.descriptors[0])] if request.descriptors else []
    serve(keys + sys.argv[1:])


def _import_all() -> bool:
    """Import what servers need; return False, having imported little, if there is a GPU."""
    from mcore_rl.device import has_cuda
    from mcore_rl.rollout.server import import_sglang

    if has_cuda():
        return False
    import_sglang([])
    _prepare_titles()
    return True


def _prepare_titles() -> None:
    """Let setproctitle, which SGLang uses, find the memory of the title before variables move."""
    os.environ["SPT_NOENV"] = "1"  # titles leave the variables alone that ps shows
    from setproctitle import getproctitle

    getproctitle()


if __name__ == "__main__":
    main(sys.argv[1:])
