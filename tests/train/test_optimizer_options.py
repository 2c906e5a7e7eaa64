"""Norms and biases do not decay, and a run that is resumed has the options of its own recipe."""

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from mcore_rl.train.actor import Actor
from tests.support.distributed import run_ranks
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    my_batches,
    token_loss,
    write_hf_model,
)

FIRST = OptimizerConfig(lr=1e-2, weight_decay=0.1, beta2=0.98)
CHANGED = OptimizerConfig(lr=1e-3, min_lr=1e-4, schedule="linear", weight_decay=0.2, beta2=0.9)


def list_options(actor: Actor) -> list[tuple[bool, float, tuple[float, float]]]:
    """Return of each group whether it has vectors alone, its decay and its betas."""
    groups = actor._turns.chosen.optimizer.param_groups
    return [
        (group["wd_mult"] == 0, group["weight_decay"], tuple(group["betas"])) for group in groups
    ]


def train_with_both(rank: int, world_size: int, port: int, path: str, root: Path) -> None:
    def make(config: OptimizerConfig) -> Actor:
        return make_actor(rank, world_size, port, ModelConfig(path=path), ParallelConfig(), config)

    actor = make(FIRST)
    found = list_options(actor)
    assert {(vectors, decay) for vectors, decay, _ in found} == {(True, 0.0), (False, 0.1)}
    actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
    actor.save(root / "step_1", {})
    actor.finish_save()
    for config in (CHANGED, replace(CHANGED, weight_decay=0.0)):
        resumed = make(config)
        resumed.load(root / "step_1")
        for vectors, decay, betas in list_options(resumed):
            assert decay == (0.0 if vectors else config.weight_decay)
            assert betas == (config.beta1, config.beta2)
        stats = resumed.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
        assert stats is not None and stats.learning_rate < 1e-3


@pytest.mark.gloo
def test_options_are_those_of_the_recipe_also_after_a_resume(tmp_path: Path) -> None:
    run_ranks(train_with_both, 1, str(write_hf_model(tmp_path / "model")), tmp_path)
