"""Options of what is trained: sizes that fit each other, and options that exclude each other."""

from typing import Any

import pytest

from mcore_rl.config import Config
from mcore_rl.config.training import CriticConfig, OptimizerConfig, ParallelConfig, TrainConfig


@pytest.mark.parametrize(
    ("sizes", "dp", "world"),
    [
        ({"ep": 2}, 2, 2),
        ({"ep": 2, "tp": 2}, 1, 2),
        ({"ep": 2, "pp": 2}, 2, 4),
        ({"ep": 2, "cp": 2}, 1, 2),
        ({"ep": 2, "etp": 2}, 4, 4),
        ({"tp": 2, "ep": 4}, 2, 4),
        ({"dp": 3}, 3, 3),
    ],
)
def test_data_parallel_size_is_the_smallest_that_fits_the_experts(
    sizes: dict[str, Any], dp: int, world: int
) -> None:
    parallel = ParallelConfig(**sizes)
    assert (parallel.dp_size, parallel.world_size) == (dp, world)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ep": 4, "dp": 1}, r"critic.parallel.ep \* critic.parallel.etp = 4 does not divide"),
        ({"tp": 2, "dp": 3, "ep": 4}, r"does not divide tp \* cp \* dp = 6; change .*parallel.dp"),
        ({"vpp": 2}, "critic.parallel.vpp=2 with critic.parallel.pp=1: there is only one"),
        ({"stage_layers": [3]}, r"critic.parallel.stage_layers=\[3\] with .*pp=1"),
        ({"pp": 2, "vpp": 2, "stage_layers": [3, 3]}, "names 2 stages: .* makes 4"),
        ({"pp": 2, "stage_layers": [3, 0]}, r"stage_layers=\[3, 0\]: every stage needs a layer"),
    ],
)
def test_sizes_that_contradict_one_another_are_refused_where_they_stand(
    sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**sizes).check("critic.parallel")


@pytest.mark.parametrize(
    ("recompute", "modules"),
    [
        ("none", set()),
        ("full", {"full"}),
        ("selective", {"layernorm", "moe_act"}),
        ("moe", {"moe"}),
        ("layernorm+mla_up_proj", {"layernorm", "mla_up_proj"}),
    ],
)
def test_what_is_recomputed(recompute: str, modules: set[str]) -> None:
    assert TrainConfig(recompute=recompute).recomputed == modules


@pytest.mark.parametrize("recompute", ["moee", "moe+full", "layernorm,moe"])
def test_a_module_that_cannot_be_recomputed_is_named(recompute: str) -> None:
    with pytest.raises(ValueError, match=r"train.recompute=.*joined by '\+' from core_attn"):
        TrainConfig(recompute=recompute)


def test_stages_of_other_sizes_need_a_pipeline() -> None:
    ParallelConfig(pp=2, vpp=2, stage_layers=[3, 2, 2, 3]).check("parallel")


@pytest.mark.parametrize(
    "name", ["router_aux_loss_coef", "router_sequence_aux_loss_coef", "router_bias_rate"]
)
def test_a_frozen_router_learns_no_balance(name: str) -> None:
    assert getattr(TrainConfig(**{name: 0.001}), name) == 0.001  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"train.{name}=0.001: .* set train.{name}=0$"):
        TrainConfig(freeze_router=True, **{name: 0.001})  # type: ignore[arg-type]


def test_each_critic_has_sizes_and_an_optimizer_of_its_own() -> None:
    one, other = CriticConfig(), CriticConfig()
    one.parallel.tp = 2
    one.optimizer.lr = 1.0
    assert (other.parallel.tp, other.optimizer.lr) == (1, 1e-5)


def test_a_learning_rate_does_not_rise_to_its_least() -> None:
    OptimizerConfig(lr=1e-5, min_lr=1e-5).check("sft.optimizer")
    with pytest.raises(ValueError, match=r"sft.optimizer.min_lr=0.1 is above sft.optimizer.lr="):
        OptimizerConfig(lr=1e-5, min_lr=0.1).check("sft.optimizer")
    with pytest.raises(ValueError, match=r"train.optimizer.min_lr=1 is above"):
        Config(train=TrainConfig(optimizer=OptimizerConfig(min_lr=1.0)))
