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
from mcore_rl.train.critic import CriticModel, _value_places
from mcore_rl.train.packing import make_rank_batch
from mcore_rl.train.runtime import init_distributed
from mcore_rl.train.stats import NotFiniteError, gather_tokens
from mcore_rl.types import StepStats, TrainBatch
from tests.support.distributed import run_alone, run_ranks
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


def value_with_nan(rank: int, world_size: int, port: int, path: str) -> str:
    critic = make_critic(rank, world_size, port, path, {})
    with torch.no_grad():
        for parameter in critic.chunks[0].parameters():
            parameter.fill_(float("nan"))
    try:
        critic.compute_values(my_batches(batches()))
    except NotFiniteError as error:
        return str(error)
    return "nothing"


@pytest.mark.gloo
def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    [said] = run_ranks(value_with_nan, 1, str(write_hf_model(tmp_path)))
    assert "the critic's values of micro-batch 0 are not finite" in said


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
    """Return the values of `make_batches()`: the model's at the preceding token, at the first that
    of the whole sequence.
    """
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(hf_dir, dtype=torch.float32)
    values = []
    for batch in make_batches():
        parts = []
        for tokens in batch.token_ids_T.split(list(batch.lens_N)):
            with torch.no_grad():
                hidden = model.model(tokens[None]).last_hidden_state[0]
                parts.append(model.score(hidden)[:, 0].roll(1))
        values.append(torch.cat(parts))
    return values


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 1), (2, 2)])
def test_each_value_has_a_token_of_its_own_in_its_sequence(cp: int, tp: int) -> None:
    """That of a sequence's last token lies at its first, in which nothing is drawn."""
    batch = TrainBatch(torch.arange(1, 10), torch.ones(9).bool(), (5, 1, 3))
    values_after = {}
    for rank in range(cp):
        part = make_rank_batch(batch, rank, cp, tp)
        places_T, twins_T = _value_places(part, batch.lens_N)
        assert twins_T is None
        for source, place in zip(part.sources_T.tolist(), places_T.tolist(), strict=True):
            assert (place < 0) == (source < 0), "padding has a value"
            if source >= 0:
                values_after[source] = place
    assert values_after == {0: 1, 1: 2, 2: 3, 3: 4, 4: 0, 5: 5, 6: 7, 7: 8, 8: 6}


def gather_shared() -> Tensor:
    """Return values of two sequences with a common beginning; each value is the last token seen."""
    tokens_T = torch.tensor([7, *range(1, 40), 50, 51, 7, *range(1, 40), 60])
    batch = TrainBatch(tokens_T, tokens_T >= 50, (42, 41))
    part = make_rank_batch(batch, 0, 1, 1, share=True)
    assert part.num_tokens == 83 > len(part.tokens_T), "nothing is shared"
    places_T, twins_T = _value_places(part, batch.lens_N)
    return gather_tokens([part.tokens_T.float()], [places_T], [83], [twins_T])[0]


def test_sequences_that_share_tokens_have_last_values_of_their_own() -> None:
    values_T = run_alone(gather_shared).tolist()
    assert values_T == [51, 7, *range(1, 40), 50, 60, 7, *range(1, 40)]
