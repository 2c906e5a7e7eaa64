"""Declares what a launch file may say; a key or value that does not fit is refused by name."""

from dataclasses import dataclass, field

from mcore_rl.config.bounds import Options, bounded, one_of
from mcore_rl.process.redaction import is_secret_name


@dataclass
class LaunchOptions(Options, group="launch"):
    """Options that every target has. The number of nodes comes from the recipe."""

    target: str = ""
    nodes: int | None = bounded(None, least=1)
    """Nodes of the job; None: as many as the recipe fills."""
    gpus_per_node: int | None = bounded(None, least=0)
    """None: plan.ranks_per_host of the recipe; 0: a run without GPUs."""
    cpus_per_node: int | None = bounded(None, least=1)
    """None: as many as the recipe's ranks and engines reserve on the fullest node."""
    object_store_mib: int | None = bounded(None, least=75)
    """Ray's shared memory on each node; None: 8192 with GPUs, 512 without."""
    interface: str = ""
    """Network interface by name; empty: the one that leads to the other nodes."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of all processes of the job. They are written to files: no secrets."""
    start_timeout_s: float = bounded(600.0, above=0)
    """How long the nodes of a job wait for one another once the first one runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.environment:
            if is_secret_name(name):
                raise ValueError(
                    f"launch.environment.{name}: the job's files would show this secret; set it in"
                    " the environment from which you submit, or refer to the cluster's own store of"
                    " secrets"
                )

    def store_mib(self, gpus_per_node: int) -> int:
        """Ray's shared memory on a node with so many GPUs."""
        if self.object_store_mib is not None:
            return self.object_store_mib
        return 8192 if gpus_per_node else 512


@dataclass
class LocalOptions(LaunchOptions, group="launch"):
    """Nodes that are processes of this machine, for rehearsals of a cluster."""

    python: str = ""
    """Interpreter that has this package; empty: the one that submits."""


@dataclass
class SlurmOptions(LaunchOptions, group="launch"):
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    time_limit: str = ""
    """As in `sbatch --time`; empty: the partition's."""
    exclusive: bool = True
    memory_gib_per_node: int = bounded(0, least=0)
    """0: all of a node's."""
    sbatch: list[str] = field(default_factory=list)
    """Further options of sbatch, such as "--mail-type=END"."""
    setup: list[str] = field(default_factory=list)
    """Lines of shell that run first on the first node, such as "module load cuda"."""
    container: str = one_of("none", ("none", "pyxis", "apptainer"))
    """none: the interpreter lies on a shared folder."""
    image: str = ""
    mounts: list[str] = field(default_factory=list)
    """Folders that the container gets besides the run's: "/host/path:/container/path"."""
    python: str = ""
    """Interpreter that has this package; empty: the one that submits, in a container `python`."""
    save_before_end_s: int = bounded(300, least=30)
    """The run saves and is queued again so long before its time limit. A step, with the save after
    it, has to fit in."""
    requeues: int = bounded(10, least=0)
    """How often the job is queued again after it saved; 0: never."""
    seeds: list[int] = field(default_factory=list)
    """A job array: one run for each, with run.seed, in <run.dir>/seed_<n>."""
    engine_partition: str = ""
    """A heterogeneous job: engines on nodes of this partition, trainer and critic on the others'.
    Takes cluster.separate_nodes=true."""
    engine_constraint: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.container == "none") != (not self.image):
            raise ValueError(
                f"launch.container={self.container} with launch.image={self.image!r}: give both, or"
                " neither"
            )
        if self.mounts and self.container == "none":
            raise ValueError(
                f"launch.mounts={self.mounts}: nothing is mounted without launch.container"
            )
        if self.engine_constraint and not self.engine_partition:
            raise ValueError(
                f"launch.engine_constraint={self.engine_constraint}: engines have nodes of their"
                " own only with launch.engine_partition"
            )
