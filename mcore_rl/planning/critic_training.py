"""Says how a recipe trains its critic: as the policy, but for the critic's own options."""

from dataclasses import replace

from mcore_rl.config import CriticConfig, TrainConfig


def critic_training(train: TrainConfig, critic: CriticConfig) -> TrainConfig:
    """Return `train` with the critic's own options for megatron-core on top of the policy's."""
    return replace(
        train,
        megatron={**train.megatron, **critic.megatron},
        ddp={**train.ddp, **critic.ddp},
    )
