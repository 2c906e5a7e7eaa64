"""Where each process of a run goes: a recipe in, reserved slots by role out."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, islice

from mcore_rl.cluster.placement import (
    Slot,
    beside,
    divide,
    engines_beside,
    gpus_per_node,
    plan_engine,
    plan_ranks,
    reserve,
)
from mcore_rl.cluster.served import plan_served
from mcore_rl.config import Config, ServedModelConfig


@dataclass(frozen=True)
class RunSlots:
    """engines, served: per engine, a slot for each machine that it spans."""

    trainer: list[Slot]
    critic: list[Slot]
    engines: list[list[Slot]]
    served: dict[str, list[list[Slot]]]


@dataclass(frozen=True)
class RunSize:
    """How many ranks and engines a command has, and which of them are guests on the trainer ranks' GPUs."""

    trainer: int
    critic: int
    engines: int
    served: Mapping[str, ServedModelConfig]
    engines_are_guests: bool
    critic_is_guest: bool

    @staticmethod
    def of(
        config: Config,
        models: Mapping[str, ServedModelConfig],
        *,
        with_engines: bool,
        with_trainer: bool,
        with_critic: bool,
    ) -> "RunSize":
        return RunSize(
            trainer=config.parallel.world_size if with_trainer else 0,
            critic=config.critic.parallel.world_size if with_critic else 0,
            engines=config.rollout.engines if with_engines else 0,
            served=models,
            engines_are_guests=config.cluster.colocated and with_engines and with_trainer,
            critic_is_guest=config.critic.colocated and with_critic,
        )

    @property
    def tenants(self) -> int:
        """Processes on a trainer rank's bundle."""
        return 1 + self.engines_are_guests + self.critic_is_guest + len(self.served_guests)

    @property
    def served_guests(self) -> dict[str, ServedModelConfig]:
        return {role: model for role, model in self.served.items() if model.is_guest and self.trainer}

    def num_cpus(self, config: Config) -> float:
        """All that is reserved."""
        engine_ranks = 0 if self.engines_are_guests else self.engines * config.rollout.engine_ranks
        critic_ranks = 0 if self.critic_is_guest else self.critic
        own = [model for role, model in self.served.items() if role not in self.served_guests and model.path]
        served = sum(model.engine_ranks * model.engines for model in own)
        ranks = self.trainer * self.tenants + critic_ranks + engine_ranks + served
        return config.cluster.cpus_per_rank * ranks


def reserve_slots(config: Config, size: RunSize) -> RunSlots:
    """Room for all of it, or the error of `reserve`."""
    cpus, rollout, gpus = config.cluster.cpus_per_rank, config.rollout, gpus_per_node()
    plans = [plan_ranks(size.trainer, cpus * size.tenants, gpus)]
    plans += [plan_ranks(0 if size.critic_is_guest else size.critic, cpus, gpus)]
    of_engine = plan_engine(rollout.engine_ranks, cpus, gpus, rollout.nodes_per_engine)
    plans += [of_engine] * (0 if size.engines_are_guests else size.engines)
    guests = size.served_guests
    served = plan_served({r: model for r, model in size.served.items() if r not in guests}, cpus, gpus)
    own = len(plans)
    slots = reserve([*plans, *chain(*served.values())], config.run.startup_timeout_s)
    rest = iter(slots[own:])
    of_served = {role: list(islice(rest, len(of_role))) for role, of_role in served.items()}
    trainer, critic, engines = divide(slots[0], size.tenants), slots[1], slots[2:own]
    if size.critic_is_guest:
        critic = beside(trainer, size.critic)
    if size.engines_are_guests:
        engines = engines_beside(trainer, size.engines, rollout.engine_ranks, rollout.nodes_per_engine)
    for role, model in guests.items():
        of_served[role] = engines_beside(trainer, model.engines, model.engine_ranks, role=role)
    return RunSlots(trainer, critic, engines, of_served)
