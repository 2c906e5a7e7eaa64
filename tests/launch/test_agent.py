"""Options of the nodes' agents are those that the agent takes."""

from pathlib import Path

from launch.options import SlurmOptions
from launch.submission import Submission, make_agent_options
from mcore_rl.cluster.node_agent.__main__ import parse
from mcore_rl.planning.bundles import NodeNeeds


def test_the_agent_understands_its_options() -> None:
    submission = Submission("train", (), Path("/runs/a"), NodeNeeds(3, 2, 8, 64))
    options = SlurmOptions(interface="ib0", start_timeout_s=90, object_store_mib=100)
    words = ["--name", "a", "--names", "a,b,c", "--folder", "/f"]
    job = parse([*words, *make_agent_options(submission, options), "--", "train"])
    assert (job.trainer_nodes, job.num_gpus, job.object_store_mib) == (2, 8, 100)
    assert (job.interface, job.timeout_s) == ("ib0", 90.0)
