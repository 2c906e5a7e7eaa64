"""A controller for tests of cluster.session, with ranks that spin or sleep and have children."""

import os
import sys
from pathlib import Path

import ray

from mcore_rl.cluster import session, watchdog
from mcore_rl.cluster.group import RankGroup
from mcore_rl.cluster.placement import reserve
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.config import ClusterConfig
from mcore_rl.planning.bundles import plan_ranks
from tests.support.cluster_workers import Worker


def tell_of_variables() -> None:
    """Print the name of each variable that is set while threads of Ray may read them."""
    set_variable = os.putenv

    def tell(name: bytes, value: bytes) -> None:
        if ray.is_initialized():
            print(f"{name!r} is set while Ray runs", file=sys.stderr)
        set_variable(name, value)

    os.putenv = tell  # called by os.environ


def main(log_dir: Path, then: str, stopped_s: float, shutdown_s: float) -> None:
    """Carry out `then`; the other two replace constants of the session."""
    watchdog.STOPPED_S = stopped_s
    session.SHUTDOWN_S = shutdown_s
    with open_ray_session(ClusterConfig(object_store_mib=80), num_cpus=3):
        [slots] = reserve([plan_ranks(2, 0.5, gpus_per_node=0)], timeout_s=60)
        group = RankGroup("trainer", slots, log_dir)
        group.build(Worker, [(0,), (1,)], deadline_s=120)
        group.call_all("start_child", deadline_s=60)
        tell_of_variables()
        print("ready", *group.pids(), flush=True)
        sys.stdin.readline()
        if then == "fail":
            raise ValueError("the controller's own error")
        group.call_all(then, deadline_s=600)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:]))
    except KeyboardInterrupt:
        sys.exit(130)
