"""A run as it is to be submitted: its command, its folder, and the nodes that it needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.options import LaunchOptions
from mcore_rl.config import ClusterConfig, PlanConfig, RolloutConfig
from mcore_rl.planning.bundles import NodeNeeds, NodeSize, RunSize, plan_nodes

DOCTOR = "doctor"
"""A command that runs on every node by itself, without Ray."""
FOLDER = "launch"
"""Below the run's folder: what was submitted, what the job printed, the notes of its nodes."""


@dataclass(frozen=True)
class Submission:
    """A command of `mcore-rl` with its settings, and what it needs.

    settings       recipe=<name> and overrides, as they were given
    run_dir        the run's folder, as the job sees it
    local_folder   where this machine keeps what it submits, if the job's run_dir is not here
    """

    command: str
    settings: Sequence[str]
    run_dir: Path
    needs: NodeNeeds
    local_folder: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.command}-{self.run_dir.name}"

    @property
    def folder(self) -> Path:
        """On this machine: what is submitted, and which job that became."""
        return self.local_folder or self.job_folder

    @property
    def job_folder(self) -> Path:
        """On the job's nodes."""
        return self.run_dir / FOLDER

    @property
    def arguments(self) -> list[str]:
        """Arguments of `mcore-rl` in the job, with the run's folder as a whole path."""
        kept = [word for word in self.settings if not word.startswith("run.dir=")]
        return [self.command, *kept, f"run.dir={self.run_dir}"]

    @property
    def is_doctor(self) -> bool:
        return self.command == DOCTOR


def find_needs(
    size: RunSize,
    rollout: RolloutConfig,
    cluster: ClusterConfig,
    plan: PlanConfig,
    options: LaunchOptions,
) -> NodeNeeds:
    """The nodes of a job. Raises ValueError if the run needs more nodes than there are to be."""
    gpus = plan.ranks_per_host if options.gpus_per_node is None else options.gpus_per_node
    needs = plan_nodes(size, rollout, cluster, NodeSize(gpus, options.cpus_per_node))
    if options.nodes is not None and options.nodes < needs.nodes:
        raise ValueError(
            f"launch.nodes={options.nodes}, but the recipe needs {needs.nodes} nodes of"
            f" {gpus} GPUs and {needs.cpus_per_node} CPUs: give it as many, or lower parallel.*,"
            " rollout.engines or cluster.cpus_per_rank"
        )
    nodes = options.nodes or needs.nodes
    cpus = options.cpus_per_node or needs.cpus_per_node
    return NodeNeeds(nodes, needs.trainer_nodes, gpus, cpus)


def make_submission(
    command: str, settings: Sequence[str], run_dir: Path, needs: NodeNeeds, options: LaunchOptions
) -> Submission:
    """The submission of a run with its folder and nodes; it has the grace that its job gives.

    Raises ValueError if the folder is relative and the job runs on other machines.
    """
    if options.notice_s and command != DOCTOR and not _names_grace(settings):
        settings = [*settings, f"run.grace_s={options.notice_s}"]
    if not options.is_away:
        return Submission(command, list(settings), run_dir.absolute(), needs)
    if not run_dir.is_absolute():
        raise ValueError(
            f"run.dir={run_dir} is relative, and the job's nodes do not have this machine's folder:"
            f" give the whole path below what they mount, such as run.dir=/mnt/{run_dir}"
        )
    local_folder = Path("runs", run_dir.name, FOLDER).absolute()
    return Submission(command, list(settings), run_dir, needs, local_folder)


def _names_grace(settings: Sequence[str]) -> bool:
    return any(word.startswith("run.grace_s=") for word in settings)


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
