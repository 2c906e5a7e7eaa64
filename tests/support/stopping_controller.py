"""A controller of cluster.session that comes upon breakpoint() twice. Its argument: how long it
waits for a debugger.
"""

import sys

from mcore_rl.cluster.breakpoints import answer_in_controller
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.config import ClusterConfig


def main(wait_s: float) -> None:
    with open_ray_session(ClusterConfig(object_store_mib=80)), answer_in_controller(wait_s):
        answer = 0
        breakpoint()
        breakpoint()
        print("answer", answer, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
