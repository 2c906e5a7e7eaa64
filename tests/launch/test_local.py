"""The script of a job on this machine; tests/e2e/test_clusters.py runs one."""

import subprocess
from pathlib import Path

from launch.jobs import SubmittedJob
from launch.local import SCRIPT, cancel, make_files, read_state, submit_command
from launch.options import LocalOptions
from launch.submission import Submission
from mcore_rl.planning.bundles import NodeNeeds


def test_each_node_is_an_agent_with_an_address() -> None:
    submission = Submission("train", ["recipe=a"], Path("/runs/a b"), NodeNeeds(2, 1, 0, 3))
    script = make_files(submission, LocalOptions(environment={"A": "1 2"}, python="py"))[SCRIPT]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    for line in ("export A='1 2'", "names=node0,node1", "addresses=127.0.0.2,127.0.0.3"):
        assert f"\n{line}\n" in script
    assert "--num-cpus 3" in script and "train recipe=a 'run.dir=/runs/a b'" in script
    assert submit_command(submission) == ["bash", "/runs/a b/launch/job.sh"]


def test_a_process_that_is_no_job_is_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "60"])
    job = SubmittedJob("local", str(other.pid), "train-a", str(tmp_path))
    assert read_state(job).text == f"process {other.pid} ended without a status: it was killed"
    cancel(job)
    assert other.poll() is None
    other.kill()
    other.wait()
    (tmp_path / f"job_{other.pid}").mkdir()
    (tmp_path / f"job_{other.pid}" / "status").write_text("75\n")
    assert read_state(job).exit_status == 75
