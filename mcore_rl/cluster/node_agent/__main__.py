"""Entry point of a node's agent; the scripts of `mcore-rl submit` start one on each node.

`python -m mcore_rl.cluster.node_agent <options> -- train recipe=... key=value`
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.cluster.node_agent.agent import run_node
from mcore_rl.cluster.node_agent.job import Job
from mcore_rl.process.disk import DiskFullError, report_any_full_disk


def main(arguments: Sequence[str]) -> int:
    try:
        with report_any_full_disk():
            return run_node(parse(arguments))
    except (ValueError, DiskFullError) as error:
        print(f"mcore-rl: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def parse(arguments: Sequence[str]) -> Job:
    """Return the job that the arguments describe. Raises ValueError as Job does."""
    parser = argparse.ArgumentParser(
        prog="python -m mcore_rl.cluster.node_agent", description=__doc__
    )
    parser.add_argument("--name", required=True, help="of this node; the first one leads")
    parser.add_argument("--names", required=True, help="of all nodes, separated by commas")
    parser.add_argument("--addresses", default="", help="the same; by default the names")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--interface", default="")
    parser.add_argument("--topology", default="", help="switches above the node: s0.s3.node7")
    parser.add_argument("--trainer-nodes", type=int, default=0)
    parser.add_argument("--num-cpus", type=int, default=1)
    parser.add_argument("--num-gpus", type=int, default=0)
    parser.add_argument("--object-store-mib", type=int, default=512)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("command", nargs="+")
    options = vars(parser.parse_args(arguments))
    name = options.pop("name")
    names = tuple(options.pop("names").split(","))
    addresses = options.pop("addresses")
    if name not in names:
        raise ValueError(f"node {name} is none of the job's nodes: {', '.join(names)}")
    return Job(
        rank=names.index(name),
        names=names,
        addresses=tuple(addresses.split(",")) if addresses else names,
        command=tuple(options.pop("command")),
        **options,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
