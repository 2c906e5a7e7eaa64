"""A process that imports nothing and forks scripts: `python -m tests.support.forking`.

A script's last arguments are the numbers of the files that it was given. Without CAN_FORK in its
environment it finds that it cannot fork, as with a GPU.
"""

import os
import runpy
import sys

from mcore_rl.cpu.fork_server import serve_forks

CAN_FORK = "MCORE_RL_TEST_CAN_FORK"

if __name__ == "__main__":
    request = serve_forks(sys.argv[1:], lambda: CAN_FORK in os.environ)
    if request is not None:
        sys.argv += map(str, request.descriptors)
        runpy.run_path(request.command[0], run_name="__main__")
