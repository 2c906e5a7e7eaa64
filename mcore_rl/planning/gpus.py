"""Counts the GPUs and hosts of a recipe's command, and compares them with cluster.gpus."""

from dataclasses import dataclass

from mcore_rl.config import Config
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


def count_gpus(config: Config, command: str = "train") -> int:
    return sum(RunSize.make(config, command).list_gpus(config.rollout.engine_ranks).values())


def find_gpus(config: Config, base: Config | None = None) -> RunGpus:
    """Return the GPUs of `mcore-rl train`; `base` is the recipe that it starts from.

    Raises ValueError if a process fits no host.
    """
    size = RunSize.make(config, "train")
    host = NodeSize(config.plan.ranks_per_host)
    hosts = plan_nodes(size, config.rollout, config.cluster, host).nodes
    before = None if base is None else count_gpus(base)
    return RunGpus(count_gpus(config), hosts, before, config.cluster.gpus)


def check_budget(config: Config, command: str) -> None:
    """Raise ValueError if `command` takes more GPUs than cluster.gpus; it names who takes them."""
    budget = config.cluster.gpus
    if budget is None:
        return
    parts = RunSize.make(config, command).list_gpus(config.rollout.engine_ranks)
    if sum(parts.values()) <= budget:
        return
    shown = " + ".join(f"{number} by {option}" for option, number in parts.items())
    raise ValueError(
        f"cluster.gpus={budget}, but the recipe takes {sum(parts.values())} GPUs: {shown}. Lower"
        f" one of them (parallel.dp={config.parallel.dp} becomes what is left with"
        " parallel.dp=null), or raise cluster.gpus"
    )
