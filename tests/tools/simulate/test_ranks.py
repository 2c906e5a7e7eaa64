"""Ranks that only pass time: what they spend, keep and answer."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.tools.simulate.costs import RecipeCosts, TowerCosts
from mcore_rl.tools.simulate.ranks import SimulatedRanks
from mcore_rl.tools.simulate.virtual_time import ReachedShares
from mcore_rl.types import LogprobOptions, StoredBatch, StoredColumn


@pytest.fixture(scope="module")
def costs() -> RecipeCosts:
    return RecipeCosts.make(load_recipe("qwen3_30b_a3b_grpo_32", []), ReachedShares())


def share(lens: tuple[int, ...], parts: tuple[int, ...]) -> StoredBatch:
    zeros = np.zeros(len(lens), np.int64)
    return StoredBatch(zeros, zeros, zeros, zeros, lens, zeros.astype(bool), parts=parts)


def test_calls_take_what_is_predicted_of_their_micro_batches(costs: RecipeCosts) -> None:
    spent = {}

    def spend(name: str, predict: Callable[[], float]) -> None:
        spent[name] = predict()

    ranks = SimulatedRanks("trainer", costs.trainer, spend)
    per_dp = [share((900, 100, 500), (2, 1)), share((700,), (1, 0))]
    lens = [[[900, 100], [500]], [[700], [1]]]
    [[scores]] = ranks.compute_logprobs(per_dp, LogprobOptions(reference=True))
    assert scores.logprobs_T == StoredColumn("ref_logprobs")
    assert ranks.train_step(per_dp, num_tokens=2200).num_tokens == 2200
    read_s = costs.trainer.read_s(1500)
    assert spent["trainer log-probs"] == costs.trainer.forward_s(lens) + read_s
    assert spent["trainer step"] == costs.trainer.step_s(lens) + read_s
    assert ranks.busy_s == pytest.approx(sum(spent.values()))
    ranks.save("x", {"step": 3})
    assert ranks.saved == {"step": 3} and spent["trainer save"] > 0


def test_samples_of_a_prompt_share_its_image(costs: RecipeCosts) -> None:
    spent = {}
    tower = TowerCosts(forward_s=1.0, step_s=3.0, prefill_s=0.0)
    trainer = replace(costs.trainer, tower=tower)
    ranks = SimulatedRanks(
        "trainer", trainer, lambda name, predict: spent.update({name: predict()})
    )
    batch = replace(share((900, 100, 500), (2, 1)), group_N=np.array([4, 4, 5]))
    ranks.compute_logprobs([batch], LogprobOptions())
    alone = costs.trainer.forward_s([[[900, 100], [500]]]) + costs.trainer.read_s(1500)
    assert spent["trainer log-probs"] == pytest.approx(alone + 2.0)


def test_what_is_offloaded_already_does_not_move_again(costs: RecipeCosts) -> None:
    ranks = SimulatedRanks("trainer", costs.trainer, lambda name, predict: None)
    state = costs.trainer.state
    assert ranks.hold_seconds(("weights",)) == costs.trainer.offload_s(state.training)
    assert ranks.hold_seconds(("weights",)) == 0
    assert ranks.hold_seconds(()) == costs.trainer.offload_s(state.weights)
    whole = ranks.hold_seconds(("weights", "training"))
    assert whole == pytest.approx(costs.trainer.offload_s(state.weights + state.training))
