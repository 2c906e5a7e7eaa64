"""Where each process of a run goes: a recipe in, reserved slots by role out."""

from dataclasses import dataclass
from itertools import chain, islice

from mcore_rl.cluster.placement import (
    Slot,
    colocate_engines,
    colocate_ranks,
    divide,
    gpus_per_node,
    reserve,
)
from mcore_rl.config import Config
from mcore_rl.planning.bundles import plan_engine, plan_ranks, plan_served
from mcore_rl.planning.run_size import RunSize


@dataclass(frozen=True)
class RunSlots:
    """engines, served: per engine, a slot for each machine that it spans."""

    trainer: list[Slot]
    critic: list[Slot]
    engines: list[list[Slot]]
    served: dict[str, list[list[Slot]]]


def reserve_slots(config: Config, size: RunSize) -> RunSlots:
    """Room for all of it, or the error of `reserve`."""
    cpus, rollout, gpus = config.cluster.cpus_per_rank, config.rollout, gpus_per_node()
    plans = [plan_ranks(size.trainer, cpus * size.tenants, gpus)]
    plans += [plan_ranks(0 if size.critic_colocated else size.critic, cpus, gpus)]
    of_engine = plan_engine(rollout.engine_ranks, cpus, gpus, rollout.nodes_per_engine)
    plans += [of_engine] * (0 if size.engines_colocated else size.engines)
    colocated = size.colocated_served
    served = plan_served(
        {r: model for r, model in size.served.items() if r not in colocated}, cpus, gpus
    )
    own = len(plans)
    slots = reserve([*plans, *chain(*served.values())], config.run.startup_timeout_s)
    rest = iter(slots[own:])
    of_served = {role: list(islice(rest, len(of_role))) for role, of_role in served.items()}
    trainer, critic, engines = divide(slots[0], size.tenants), slots[1], slots[2:own]
    if size.critic_colocated:
        critic = colocate_ranks(trainer, size.critic)
    if size.engines_colocated:
        engines = colocate_engines(
            trainer, size.engines, rollout.engine_ranks, rollout.nodes_per_engine
        )
    for role, model in colocated.items():
        of_served[role] = colocate_engines(trainer, model.engines, model.engine_ranks, role=role)
    return RunSlots(trainer, critic, engines, of_served)
