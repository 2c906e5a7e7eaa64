"""A critic: values from a head of its own, equal in every layout and to those of transformers."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.algo.values import value_loss
from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from mcore_rl.train.critic import CriticModel
from mcore_rl.train.runtime import init_distributed
from mcore_rl.types import StepStats, TrainBatch
from tests.support.distributed import run_ranks
from tests.support.gradients import boxed_gradients, check_gradients, whole_gradients
from tests.support.tiny_training import NUM_TOKENS, make_batches, my_batches, write_hf_model

Layout = dict[str, Any]
TWO_RANKS: list[Layout] = [{"tp": 2, "ep": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2}, {"dp": 2}]
LOSS = partial(value_loss, clip=0.2)


def batches() -> list[TrainBatch]:
    return [
        replace(b, returns_T=b.advantages_T, values_T=torch.zeros(sum(b.lens_N)))
        for b in make_batches()
    ]


def make_critic(rank: int, world_size: int, port: int, path: str, layout: Layout) -> CriticModel:
    parallel = ParallelConfig(**layout)
    init_distributed(rank, world_size, "127.0.0.1", port, parallel, seed=0, timeout_s=60)
    train = TrainConfig(router_aux_loss_coef=0.1)
    optimizer = OptimizerConfig(lr=1e-3, clip_grad=0.0)
    return CriticModel(ModelConfig(path=path), parallel, train, optimizer, 6, seed=0)


def step(critic: CriticModel) -> StepStats | None:
    return critic.train_step(my_batches(batches()), LOSS, num_tokens=NUM_TOKENS)


def learn(
    rank: int, world_size: int, port: int, path: str, layouts: list[Layout], out: str
) -> list[Any]:
    """Return by layout: values before two steps, the steps' stats, gradients, values after."""
    results: list[Any] = []
    for layout in layouts:
        critic = make_critic(rank, world_size, port, path, layout)
        before = critic.compute_values(my_batches(batches()))
        stats = [step(critic), step(critic)]
        results.append(
            (before, stats, boxed_gradients(critic), critic.compute_values(my_batches(batches())))
        )
        if out:
            critic.export_hf(Path(out))
    return results


@pytest.mark.gloo
def test_layouts_agree_and_the_export_is_a_reward_model_of_transformers(tmp_path: Path) -> None:
    path = str(write_hf_model(tmp_path / "model", tie_word_embeddings=True))
    out = tmp_path / "critic"
    [(before, stats, gradients, after)] = run_ranks(learn, 1, path, [{}], str(out))[0]
    assert all(not values.any() for values in before)
    assert stats[1].loss < stats[0].loss
    for got, want in zip(after, transformers_values(out), strict=True):
        assert want.abs().max() > 1e-3
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)

    per_rank = run_ranks(learn, 2, path, TWO_RANKS, "", timeout_s=300)
    wanted = whole_gradients(gradients)
    for layout, results in zip(TWO_RANKS, zip(*per_rank, strict=True), strict=True):
        check_gradients([boxed for _, _, boxed, _ in results], wanted, layout)
        owners = [result for result in results if result[3] is not None]
        assert len(owners) == layout.get("dp", 1), layout
        for dp, (_, their_stats, _, values) in enumerate(owners):
            for got, want in zip(their_stats, stats, strict=True):
                assert got.loss == pytest.approx(want.loss, rel=1e-5), layout
                assert got.metrics == pytest.approx(want.metrics, rel=1e-4), layout
            for got, want in zip(values, after[dp :: len(owners)], strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def start_again(rank: int, world_size: int, port: int, reward_model: str, folder: str) -> list[Any]:
    """Return values of a critic that starts from a reward model, and of its resumed checkpoint.

    The checkpoint is loaded in another layout.
    """
    critic = make_critic(rank, world_size, port, reward_model, {"tp": 2, "ep": 2})
    first = critic.compute_values(my_batches(batches()))
    step(critic)
    critic.save(Path(folder), {"step": 7})
    critic.finish_save()
    saved = critic.compute_values(my_batches(batches()))
    stats = step(critic)
    critic = make_critic(rank, world_size, port, reward_model, {"pp": 2})
    extra = critic.load(Path(folder))
    return [first, saved, stats, critic.compute_values(my_batches(batches())), step(critic), extra]


@pytest.mark.gloo
def test_starts_from_a_reward_model_and_goes_on_from_a_checkpoint_in_another_layout(
    tmp_path: Path,
) -> None:
    path = str(write_hf_model(tmp_path / "model"))
    reward_model = tmp_path / "reward_model"
    run_ranks(learn, 1, path, [{}], str(reward_model))
    results = run_ranks(start_again, 2, str(reward_model), str(tmp_path / "step"))
    first, saved, stats, *_ = results[0]
    *_, loaded, resumed, extra = results[1]
    assert extra == {"step": 7}
    for got, want in zip(first, transformers_values(reward_model), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    for got, want in zip(loaded, saved, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert resumed.loss == pytest.approx(stats.loss, rel=1e-5)


def transformers_values(hf_dir: Path) -> list[Tensor]:
    """Return the values of `make_batches()`: the model's at the preceding token, 0 at the first."""
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(hf_dir, dtype=torch.float32)
    values = []
    for batch in make_batches():
        parts = []
        for tokens in batch.token_ids_T.split(list(batch.lens_N)):
            with torch.no_grad():
                hidden = model.model(tokens[None]).last_hidden_state[0]
                parts += [torch.zeros(1), model.score(hidden)[:-1, 0]]
        values.append(torch.cat(parts))
    return values
