"""A recipe in, the facts about its policy and its critic out, each model directory read once."""

from dataclasses import dataclass

from mcore_rl.algo.choice import needs_of
from mcore_rl.config import Config
from mcore_rl.slices.hf.facts import ModelFacts


@dataclass(frozen=True)
class RecipeModels:
    """The models that a recipe trains, as their directories describe them.

    critic   None without a critic; a critic that starts from the policy shares the policy's facts
    """

    policy: ModelFacts
    critic: ModelFacts | None


def read_models(config: Config) -> RecipeModels:
    """Raises ValueError naming the option and the file if a model is missing or not supported."""
    policy = read_policy(config)
    return RecipeModels(
        policy, read_critic(config, policy) if needs_of(config.algorithm).critic else None
    )


def read_policy(config: Config) -> ModelFacts:
    """Raises ValueError naming model.path if the model is missing or not supported."""
    try:
        return ModelFacts.read(config.model.path)
    except ValueError as error:
        raise ValueError(f"model.path={config.model.path}: {error}") from None


def read_critic(config: Config, policy: ModelFacts) -> ModelFacts:
    """Return the model that the critic starts from: critic.path, or the policy if that is empty.

    Raises ValueError naming critic.path if the model is missing or not supported.
    """
    if not config.critic.path:
        return policy
    try:
        return ModelFacts.read(config.critic.path)
    except ValueError as error:
        raise ValueError(f"critic.path={config.critic.path}: {error}") from None
