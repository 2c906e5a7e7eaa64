"""Reads the facts about the models that a recipe trains, each model directory once."""

from dataclasses import dataclass, replace

from mcore_rl.algo.lookup import needs_of
from mcore_rl.config import Config, CriticConfig, TrainConfig
from mcore_rl.weights.hf.config import ModelFacts


@dataclass(frozen=True)
class RecipeModels:
    """The models that a recipe trains, as their directories describe them.

    critic   None without a critic; a critic that starts from the policy shares the policy's facts
    """

    policy: ModelFacts
    critic: ModelFacts | None


def read_models(config: Config) -> RecipeModels:
    """Raises ValueError naming the option and the file if a model is missing or not supported."""
    policy = read_policy(config.model.path)
    return RecipeModels(
        policy,
        read_critic(config.critic.path, policy) if needs_of(config.algorithm).critic else None,
    )


def read_policy(path: str) -> ModelFacts:
    """`path`: model.path. Raises ValueError naming it if the model is missing or not supported."""
    try:
        return ModelFacts.read(path)
    except ValueError as error:
        raise ValueError(f"model.path={path}: {error}") from None


def read_critic(path: str, policy: ModelFacts) -> ModelFacts:
    """Return the model that the critic starts from: `path` (critic.path), or the policy if empty.

    Raises ValueError naming critic.path if the model is missing or not supported.
    """
    if not path:
        return policy
    try:
        return ModelFacts.read(path)
    except ValueError as error:
        raise ValueError(f"critic.path={path}: {error}") from None


def make_critic_training(train: TrainConfig, critic: CriticConfig) -> TrainConfig:
    """Return `train` with the critic's own options for megatron-core on top of the policy's."""
    return replace(
        train,
        megatron={**train.megatron, **critic.megatron},
        ddp={**train.ddp, **critic.ddp},
    )
