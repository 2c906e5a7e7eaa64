"""Counts the ranks and engines that a command needs for a recipe."""

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rl.algo.lookup import needs_of
from mcore_rl.config import Config, ServedModelConfig

_REWARD_MODELS = ("judge", "reward_model")


@dataclass(frozen=True)
class CommandParts:
    """The parts of a recipe that a command starts; `served` are roles of served models."""

    trainer: bool = False
    engines: bool = False
    served: tuple[str, ...] = ()


COMMANDS = {
    "train": CommandParts(True, True, (*_REWARD_MODELS, "teacher")),
    "sft": CommandParts(trainer=True),
    "dpo": CommandParts(trainer=True),
    "pairs": CommandParts(engines=True, served=_REWARD_MODELS),
    "eval": CommandParts(engines=True, served=_REWARD_MODELS),
}


@dataclass(frozen=True)
class RunSize:
    """Numbers of ranks and engines of a command, and which share the trainer ranks' GPUs."""

    trainer: int
    critic: int
    engines: int
    served: Mapping[str, ServedModelConfig]
    engines_colocated: bool
    critic_colocated: bool
    trainer_tp: int = 1
    critic_tp: int = 1

    @staticmethod
    def of(config: Config, command: str) -> "RunSize":
        """The sizes that `command`, one of COMMANDS, needs of the recipe."""
        parts = COMMANDS[command]
        has_critic = command == "train" and needs_of(config.algorithm).critic
        return RunSize(
            trainer=config.parallel.world_size if parts.trainer else 0,
            critic=config.critic.parallel.world_size if has_critic else 0,
            engines=config.rollout.engines if parts.engines else 0,
            served={r: m for r, m in config.served_models.items() if r in parts.served},
            engines_colocated=config.cluster.colocated and parts.engines and parts.trainer,
            critic_colocated=config.critic.colocated and has_critic,
            trainer_tp=config.parallel.tp,
            critic_tp=config.critic.parallel.tp,
        )

    @property
    def tenants(self) -> int:
        """Processes that share the bundle of a trainer rank: its GPU and its CPUs."""
        return 1 + self.engines_colocated + self.critic_colocated + len(self.colocated_served)

    @property
    def colocated_served(self) -> dict[str, ServedModelConfig]:
        return {
            role: model
            for role, model in self.served.items()
            if model.is_colocated and self.trainer
        }

    def num_cpus(self, cpus_per_rank: float, ranks_per_engine: int) -> float:
        """CPUs that the command reserves in Ray."""
        engine_ranks = 0 if self.engines_colocated else self.engines * ranks_per_engine
        critic_ranks = 0 if self.critic_colocated else self.critic
        own = [
            model
            for role, model in self.served.items()
            if role not in self.colocated_served and model.path
        ]
        served = sum(model.engine_ranks * model.engines for model in own)
        ranks = self.trainer + critic_ranks + engine_ranks + served
        return cpus_per_rank * ranks
