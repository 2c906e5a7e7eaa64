"""An image costs what its tower computes, more where it is trained or computed again."""

import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.recipe_models import read_policy
from mcore_rl.tools.simulate.costs import TowerCosts
from mcore_rl.tools.simulate.virtual_time import GPUS, ReachedShares
from mcore_rl.weights.hf.flops import TowerFlops

SHARES = ReachedShares()


def costs_of(*overrides: str) -> TowerCosts:
    config = load_recipe("qwen2_5_vl_7b_grpo_8", list(overrides))
    facts = read_policy(config.model.path)
    costs = TowerCosts.make(facts, 400, config.train, config.rollout.tp, GPUS["h100"], SHARES)
    assert costs is not None
    return costs


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        (("train.vision=none", "train.recompute=none"), 1),
        (("train.vision=none", "train.recompute=full"), 1),
        (("train.vision=all", "train.recompute=none"), 3),
    ],
    ids=["frozen", "frozen-recomputed", "trained"],
)
def test_a_step_has_backward_passes_of_what_is_trained(
    overrides: tuple[str, ...], passes: int
) -> None:
    costs = costs_of(*overrides)
    assert costs.step_s == pytest.approx(passes * costs.forward_s)


def test_trained_blocks_are_computed_again() -> None:
    costs = costs_of("train.vision=all", "train.recompute=full")
    assert 3.5 * costs.forward_s < costs.step_s < 4 * costs.forward_s


def test_seconds_are_operations_of_a_square_image() -> None:
    config = load_recipe("qwen2_5_vl_7b_grpo_8", [])
    flops = TowerFlops.from_facts(read_policy(config.model.path))
    assert flops is not None
    per_second = GPUS["h100"].count_training(has_experts=False)
    assert costs_of().forward_s == pytest.approx(flops.count_forward([(1, 40, 40)]) / per_second)
