"""A critic's own options for megatron-core come on top of the policy's."""

from mcore_rl.config import CriticConfig, CriticLoraConfig, LoraConfig, TrainConfig
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
    assert trained.lora.rank == 0 and not trained.freeze_router


def test_factors_leave_a_critics_routers_and_indexers_alone() -> None:
    train = TrainConfig(router_aux_loss_coef=0.1, router_bias_rate=0.1, indexer_loss=0.1)
    lora = CriticLoraConfig(rank=4, alpha=8.0, rslora=True, targets=["q_proj"], experts=False)
    trained = make_critic_training(train, CriticConfig(lora=lora))
    assert trained.lora == LoraConfig(4, 8.0, True, ["q_proj"], False)
    assert trained.router_aux_loss_coef == trained.router_bias_rate == trained.indexer_loss == 0
    frozen = make_critic_training(TrainConfig(freeze_router=True), CriticConfig(lora=lora))
    assert not frozen.freeze_router
