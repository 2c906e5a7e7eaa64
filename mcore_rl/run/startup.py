"""Starts the processes of a training run, one after the other where they share GPUs."""

from dataclasses import dataclass

from mcore_rl.algo.lookup import needs_of
from mcore_rl.algo.policy_loss import TokenLoss, make_value_loss
from mcore_rl.cluster.engines import EngineGroup
from mcore_rl.cluster.model_groups import CriticGroup, TrainerGroup
from mcore_rl.cluster.run import RunProcesses
from mcore_rl.config import Config
from mcore_rl.loops.training import StepOptions
from mcore_rl.run.roles.colocation import CRITIC, TRAINER, EngineMemory, SharedGpus


@dataclass(frozen=True)
class Started:
    """The groups of a training run, all built except engines with GPUs of their own.

    `engines.wait_built` waits for such engines.
    """

    trainer: TrainerGroup
    critic: CriticGroup | None
    engines: EngineGroup
    gpus: SharedGpus


def start_training(config: Config, processes: RunProcesses, loss: TokenLoss) -> Started:
    """Start all groups of a training run.

    Groups with GPUs of their own start at the same time. Groups that share GPUs start one after the
    other, and each gives up its memory before the next starts.
    """
    options = StepOptions.from_config(config, needs_of(config.algorithm))
    num_steps, num_critic_steps = options.count_optimizer_steps(config.run.steps)
    timeout_s = config.run.call_timeout_s
    watched = processes.run_watched

    engines = processes.start_engines()
    keys = processes.keys
    colocated = EngineMemory((), timeout_s, keys)
    if config.cluster.colocated:
        colocated = EngineMemory([engine.url for engine in engines.wait_built()], timeout_s, keys)
        watched(colocated.for_training())
    gpus = SharedGpus(colocated, watched)
    for role in processes.served_engines.colocated:
        urls = processes.start_colocated_served(role)
        gpus.add_colocated(role, EngineMemory(urls, timeout_s, keys))

    trainer = processes.start_trainer(config.train.optimizer, num_steps, loss)
    critic = None
    if not config.critic.colocated:
        critic = processes.start_critic(num_critic_steps, make_value_loss(config.critic))
    trainer.wait_built()
    if config.cluster.offload:
        gpus.add(TRAINER, trainer)
    if config.critic.colocated:
        critic = processes.start_critic(num_critic_steps, make_value_loss(config.critic))
    if critic is not None:
        critic.wait_built()
        if config.cluster.offload and config.critic.colocated:
            gpus.add(CRITIC, critic)
    return Started(trainer, critic, engines, gpus)
