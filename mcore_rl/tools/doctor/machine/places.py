"""Says which of several nodes this process checks: from options, or from SLURM's variables."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class NodePlace:
    """The number of this node, of how many, and its name in the report."""

    rank: int
    size: int
    name: str


def place_of(
    nodes: int | None, node_rank: int | None, node_name: str, environ: Mapping[str, str]
) -> NodePlace:
    """Return the place that the options give; SLURM's task gives what they leave out.

    Raises ValueError naming the option that is missing or out of range.
    """
    size = _number("--nodes", nodes, "SLURM_NTASKS", environ)
    rank = _number("--node-rank", node_rank, "SLURM_PROCID", environ)
    if size < 1:
        raise ValueError(f"--nodes={size}: there is at least one")
    if not 0 <= rank < size:
        raise ValueError(f"--node-rank={rank}: nodes are counted from 0 to {size - 1}")
    return NodePlace(rank, size, node_name or environ.get("SLURMD_NODENAME") or _host())


def _number(option: str, given: int | None, variable: str, environ: Mapping[str, str]) -> int:
    if given is not None:
        return given
    value = environ.get(variable, "")
    if not value.isdigit():
        raise ValueError(
            f"{option} is not given and {variable} is not set: give {option}, or start one task on"
            " each node by `srun mcore-rl doctor --rendezvous <shared folder>`"
        )
    return int(value)


def _host() -> str:
    return socket.gethostname().partition(".")[0]
