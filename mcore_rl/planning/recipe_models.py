"""Reads the models that a recipe trains, and picks the parts of the recipe that a plan needs.

recipe, config.json  -->  PlannedRun  -->  memory of ranks, traffic of weight syncs, seconds
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mcore_rl.algo.lookup import needs_of
from mcore_rl.config import (
    AlgorithmConfig,
    ClusterConfig,
    Config,
    CriticConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    PlanConfig,
    RolloutConfig,
    ServedModelConfig,
    SyncConfig,
    TrainConfig,
)
from mcore_rl.weights.hf.config import ModelFacts


@dataclass(frozen=True)
class RecipeModels:
    """The models that a recipe trains, as their directories describe them.

    critic   None without a critic; a critic that starts from the policy shares the policy's facts
    """

    policy: ModelFacts
    critic: ModelFacts | None


def _read_models(
    model: ModelConfig, critic: CriticConfig, algorithm: AlgorithmConfig
) -> RecipeModels:
    """Return the models of a recipe, the critic only where the algorithm has one."""
    policy = read_policy(model.path)
    has_critic = needs_of(algorithm).critic
    return RecipeModels(policy, read_critic(critic.path, policy) if has_critic else None)


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
    """Return `train` with the critic's factors, and its own options of megatron-core's on top.

    What `train` says of routers and indexers is the policy's if factors leave those frozen.
    """
    lora = critic.lora
    if lora.rank:
        train = replace(
            train,
            freeze_router=False,
            router_aux_loss_coef=0.0,
            router_sequence_aux_loss_coef=0.0,
            router_bias_rate=0.0,
            indexer_loss=0.0,
        )
    return replace(
        train,
        megatron={**train.megatron, **critic.megatron},
        ddp={**train.ddp, **critic.ddp},
        lora=LoraConfig(lora.rank, lora.alpha, lora.rslora, lora.targets, lora.experts),
        fake_quantization="none",
        mtp_loss=0.0,
    )


def shares_frozen(lora: LoraConfig, parallel: ParallelConfig, critic: CriticConfig) -> bool:
    """Return whether a critic's ranks use the weights below factors that the policy's ranks keep.

    Rank k of both is on one GPU, and holds the same part of one model.
    """
    both = bool(lora.rank) and bool(critic.lora.rank)
    layouts = (replace(own, dp=own.dp_size) for own in (parallel, critic.parallel))
    return both and critic.colocated and not critic.path and next(layouts) == next(layouts)


@dataclass(frozen=True)
class PlannedRun:
    """The parts of a recipe that decide what its ranks hold and what a weight sync sends.

    dtype    model.dtype
    critic   None if the algorithm has none
    served   models that are served beside the policy, by role
    """

    models: RecipeModels
    dtype: str
    parallel: ParallelConfig
    train: TrainConfig
    critic: CriticConfig | None
    rollout: RolloutConfig
    cluster: ClusterConfig
    sync: SyncConfig
    plan: PlanConfig
    served: Mapping[str, ServedModelConfig]

    @staticmethod
    def make(config: Config, models: RecipeModels | None = None) -> "PlannedRun":
        """Return the run of a recipe; without `models`, they are read.

        Raises ValueError naming the option and the file if a model is missing or not supported.
        """
        return PlannedRun(
            models or _read_models(config.model, config.critic, config.algorithm),
            config.model.dtype,
            config.parallel,
            config.train,
            config.critic if needs_of(config.algorithm).critic else None,
            config.rollout,
            config.cluster,
            config.sync,
            config.plan,
            config.served_models,
        )
