"""Counts the GPUs and hosts of a recipe's command, and compares them with cluster.gpus."""

from dataclasses import dataclass

from mcore_rl.config import ClusterConfig, RolloutConfig
from mcore_rl.planning.bundles import NodeSize, RunSize, plan_nodes


@dataclass(frozen=True)
class RunGpus:
    """GPUs of a command and the hosts that they fill.

    base_gpus    GPUs of the recipe that this one starts from; None: there is none to compare with
    budget_gpus  cluster.gpus
    """

    gpus: int
    hosts: int
    base_gpus: int | None = None
    budget_gpus: int | None = None

    def explain(self) -> str:
        """Return a line such as `GPUs: 48 on 6 hosts (the recipe it starts from: 32)`."""
        notes = []
        if self.base_gpus is not None and self.base_gpus != self.gpus:
            notes.append(f"the recipe it starts from: {self.base_gpus}")
        if self.budget_gpus is not None and self.budget_gpus != self.gpus:
            notes.append(f"cluster.gpus allows {self.budget_gpus}")
        shown = f" ({'; '.join(notes)})" if notes else ""
        return f"GPUs: {self.gpus} on {self.hosts} host{'s' * (self.hosts > 1)}{shown}"


def find_gpus(
    size: RunSize,
    rollout: RolloutConfig,
    cluster: ClusterConfig,
    ranks_per_host: int,
    base_gpus: int | None = None,
) -> RunGpus:
    """Return the GPUs of a command of this size; see RunGpus for `base_gpus`.

    Raises ValueError if a process fits no host.
    """
    hosts = plan_nodes(size, rollout, cluster, NodeSize(ranks_per_host)).nodes
    return RunGpus(size.count_all_gpus(), hosts, base_gpus, cluster.gpus)


def check_budget(size: RunSize, budget: int | None, dp: int | None) -> None:
    """Raise ValueError if a command takes more GPUs than `budget`; it names who takes them.

    budget   cluster.gpus; None: any number
    dp       parallel.dp
    """
    num_gpus = size.count_all_gpus()
    if budget is None or num_gpus <= budget:
        return
    shown = " + ".join(f"{number} by {option}" for option, number in size.list_gpus().items())
    raise ValueError(
        f"cluster.gpus={budget}, but the recipe takes {num_gpus} GPUs: {shown}. Lower one of them"
        f" (parallel.dp={dp} becomes what is left with parallel.dp=null), or raise cluster.gpus"
    )
