"""Gives the options of a node's agent that are the same on all nodes of a job."""

from launch.options import LaunchOptions
from launch.submission import Submission


def make_agent_options(submission: Submission, options: LaunchOptions) -> list[str]:
    """Options of `python -m mcore_rl.cluster.node_agent`."""
    needs = submission.needs
    chosen = {
        "--trainer-nodes": needs.trainer_nodes,
        "--num-gpus": needs.gpus_per_node,
        "--object-store-mib": options.store_mib(needs.gpus_per_node),
        "--timeout-s": f"{options.start_timeout_s:g}",
        "--interface": options.interface,
    }
    return [part for key, value in chosen.items() if value != "" for part in (key, str(value))]
