"""Ray without the processes that no run uses starts actors, and leaves Ray as it was."""

import subprocess
import sys

import pytest
import ray._private.node
import ray._private.utils

from mcore_rl.cluster.session import LEFT_OUT, leave_processes_out
from mcore_rl.cluster.worker_setup import FORKS
from tests.support.policy import ROOT

PROGRAM = """
import sys
import psutil, ray
from contextlib import nullcontext
from mcore_rl.cluster.session import leave_processes_out
from mcore_rl.cpu.worker_forks import worker_forks

@ray.remote(num_cpus=0)
class Rank:
    def answer(self):
        return 42, "torch" in sys.modules

forks = worker_forks() if sys.argv[1:] else nullcontext()
forks.__enter__()
with leave_processes_out():
    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
    )
rank = Rank.remote()
assert ray.get(rank.answer.remote(), timeout=100) == (42, bool(sys.argv[1:]))
ray.kill(rank)
assert ray.get(Rank.remote().answer.remote(), timeout=100) == (42, bool(sys.argv[1:]))
commands = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)]
for script in ("dashboard/dashboard.py", "log_monitor.py", "autoscaler/_private/monitor.py"):
    assert not any(script in command for command in commands), script
assert any("gcs_server" in command for command in commands)
ray.shutdown()
forks.__exit__(None, None, None)
print("done")
"""


@pytest.mark.e2e
@pytest.mark.parametrize("arguments", [[], pytest.param(["forked"], marks=pytest.mark.slow)])
def test_actors_work_and_no_needless_process_runs(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FORKS, raising=False)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.stdout.splitlines()[-1:] == ["done"], done.stdout + done.stderr


def test_ray_is_as_before_afterwards() -> None:
    node = ray._private.node.Node
    before = [getattr(node, name) for name in LEFT_OUT]
    ask = ray._private.utils.get_dashboard_dependency_error
    with pytest.raises(KeyError), leave_processes_out():
        assert ray._private.utils.get_dashboard_dependency_error is not ask
        assert [getattr(node, name) for name in LEFT_OUT] != before
        raise KeyError
    assert [getattr(node, name) for name in LEFT_OUT] == before
    assert ray._private.utils.get_dashboard_dependency_error is ask
