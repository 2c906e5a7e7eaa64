"""A job as each of its nodes is told of it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """A job and which of its nodes this one is.

    rank             of this node; node 0 starts Ray's head and the command
    names            of all nodes, in the order of their ranks
    addresses        names or addresses at which the nodes reach one another, in the same order
    folder           of this attempt, seen by all nodes
    command          arguments of `mcore-rl`, without cluster.address
    interface        network interface to use; empty: the one that leads to the other nodes
    topology         switches above this node and its name, as in s0.s3.node7; empty: unknown
    trainer_nodes    the first nodes, which are kept for trainer and critic; 0: all share all
    timeout_s        how long nodes wait for one another
    """

    rank: int
    names: tuple[str, ...]
    addresses: tuple[str, ...]
    folder: Path
    command: tuple[str, ...]
    interface: str = ""
    topology: str = ""
    trainer_nodes: int = 0
    num_cpus: int = 1
    num_gpus: int = 0
    object_store_mib: int = 512
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.names) == len(self.addresses):
            raise ValueError(
                f"node {self.rank} of a job of {len(self.names)} nodes"
                f" ({', '.join(self.names)}) with {len(self.addresses)} addresses"
            )

    @property
    def name(self) -> str:
        return self.names[self.rank]

    @property
    def order(self) -> str:
        """The node's place in an order in which nodes below one switch are neighbors."""
        switches = self.topology.rpartition(".")[0]
        return f"{switches}.{self.rank:06d}".removeprefix(".")

    @property
    def num_nodes(self) -> int:
        return len(self.names)
