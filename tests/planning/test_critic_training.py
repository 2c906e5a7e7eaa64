"""A critic's own options for megatron-core come on top of the policy's."""

from mcore_rl.config import CriticConfig, TrainConfig
from mcore_rl.planning.recipe_models import make_critic_training


def test_a_critic_is_trained_as_the_policy_but_for_its_own_options() -> None:
    train = TrainConfig(
        recompute="moe",
        megatron={"deterministic_mode": True, "moe_z_loss_coeff": 0.1},
        ddp={"bucket_size": 1},
    )
    critic = CriticConfig(megatron={"moe_z_loss_coeff": 0.2}, ddp={"bucket_size": 2})
    trained = make_critic_training(train, critic)
    assert trained.megatron == {"deterministic_mode": True, "moe_z_loss_coeff": 0.2}
    assert trained.ddp == {"bucket_size": 2}
    assert trained.recompute == "moe"
    assert train.ddp == {"bucket_size": 1}
