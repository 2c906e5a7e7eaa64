"""Balance of the experts on real ranks.

Loads and losses are those of transformers' routers; the bias is the same in every layout and after
a checkpoint; frozen routers stay as they are.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.batches.batch import make_filler
from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.train.actor import Actor
from tests.support.distributed import run_each, run_ranks
from tests.support.tiny_models import write_model
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    make_batches,
    my_batches,
    token_loss,
    write_hf_model,
)

RATE = 0.05
STEERED: dict[str, Any] = {
    "router_aux_loss_coef": 0.0,
    "router_sequence_aux_loss_coef": 0.1,
    "router_bias_rate": RATE,
}
FROZEN: dict[str, Any] = {"router_aux_loss_coef": 0.0, "freeze_router": True}
LAYOUTS = [
    pytest.param((2, [{"tp": 2, "ep": 2}]), id="two_ranks"),
    pytest.param((2, [{"tp": 2}, {"ep": 2}]), id="two_ranks_apart", marks=pytest.mark.slow),
    pytest.param(
        (4, [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 4}]),
        id="four_ranks",
        marks=pytest.mark.slow,
    ),
]
"""(number of ranks, layouts)"""


def step(actor: Actor, *, filler: bool = False) -> Any:
    batches = my_batches()
    batches += [make_filler(batches[0])] * filler
    return actor.train_step(batches, token_loss, temperature=1.0, num_tokens=NUM_TOKENS)


def tensors_named(actor: Actor, part: str) -> dict[str, torch.Tensor]:
    """Return copies of this rank's HF tensors with `part` in their name; routers are never cut."""
    shards, tensors = actor.weight_layout()
    return {s.box.name: s.view(tensors).clone() for s in shards if part in s.box.name}


def steer(rank: int, world_size: int, port: int, path: Path, layout: Any, saves: Path) -> Any:
    """Return the biases before and after each of two steps, the stats, and a resumed run's biases.

    The resumed run loads the one-process checkpoint of the first step and takes the second step.
    """
    model = ModelConfig(path=str(path / "deepseek_v3"))
    actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout), **STEERED)
    biases = [tensors_named(actor, "e_score_correction_bias")]
    stats = [step(actor)]
    biases.append(tensors_named(actor, "e_score_correction_bias"))
    actor.save(saves / f"{world_size}{sorted(layout)}", {})
    stats.append(step(actor, filler=True))
    biases.append(tensors_named(actor, "e_score_correction_bias"))
    actor.finish_save()
    again = make_actor(rank, world_size, port, model, ParallelConfig(**layout), **STEERED)
    again.load(saves / "1[]")
    resumed = [tensors_named(again, "e_score_correction_bias")]
    step(again)
    resumed.append(tensors_named(again, "e_score_correction_bias"))
    return biases, stats, resumed


def freeze(rank: int, world_size: int, port: int, path: Path, layout: Any, saves: Path) -> Any:
    """Return the layers' weights before and after two steps with a checkpoint in between."""
    model = ModelConfig(path=str(path / "qwen3_moe"))
    folder = saves / f"frozen{world_size}{sorted(layout)}"
    first = make_actor(rank, world_size, port, model, ParallelConfig(**layout), **FROZEN)
    before = tensors_named(first, "layers")
    step(first)
    first.save(folder, {})
    first.finish_save()
    second = make_actor(rank, world_size, port, model, ParallelConfig(**layout), **FROZEN)
    second.load(folder)
    stats = step(second)
    return before, tensors_named(second, "layers"), stats


def run_layout(rank: int, world_size: int, port: int, path: Path, layout: Any) -> Any:
    steered = steer(rank, world_size, port, path, layout, path)
    return steered, freeze(rank, world_size, port, path, layout, path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("balance")
    write_hf_model(folder / "qwen3_moe")
    write_model("deepseek_v3", folder / "deepseek_v3")
    return folder


@pytest.fixture(scope="module")
def alone(models: Path) -> Any:
    return run_ranks(run_layout, 1, models, {})[0]


@pytest.fixture(scope="module", params=LAYOUTS)
def cut(models: Path, alone: Any, request: pytest.FixtureRequest) -> Any:
    """Results of several ranks, by layout, then by rank."""
    num_ranks, layouts = request.param
    return run_each(run_layout, num_ranks, layouts, models)


@pytest.mark.gloo
def test_layouts_steer_the_bias_alike_and_continue_from_a_checkpoint(alone: Any, cut: Any) -> None:
    (biases, wanted, resumed), _ = alone
    layers = sorted(biases[0])
    assert len(layers) == 3
    for name in layers:
        first, second = biases[1][name] - biases[0][name], biases[2][name] - biases[1][name]
        assert {round(x / RATE, 3) for x in [*first.tolist(), *second.tolist()]} <= {-1.0, 0.0, 1.0}
        assert first.any() and biases[0][name].dtype == torch.float32
        assert torch.equal(resumed[0][name], biases[1][name])
        assert torch.equal(resumed[1][name], biases[2][name]), (
            "a filler counted, or the checkpoint lost the bias"
        )
    for results in cut:
        held = set()
        for (got, _, again), _ in results:
            for i, wanted_biases in enumerate(biases):
                assert all(torch.equal(bias, wanted_biases[name]) for name, bias in got[i].items())
            for i in range(2):
                assert all(
                    torch.equal(bias, biases[i + 1][name]) for name, bias in again[i].items()
                )
            held |= got[0].keys()
        assert sorted(held) == layers
        found = next(stats for (_, stats, _), _ in results if stats[0] is not None)
        for got, want in zip(found, wanted, strict=True):
            assert got.metrics == pytest.approx(want.metrics, abs=1e-5)


@pytest.mark.gloo
def test_frozen_routers_stay_bit_for_bit(alone: Any, cut: Any) -> None:
    wanted = alone[1][2]
    for _, (before, after, stats) in [alone, *(r for results in cut for r in results)]:
        routers = [name for name in before if name.endswith("mlp.gate.weight")]
        assert routers and len(routers) < len(before)
        for name in before:
            assert torch.equal(before[name], after[name]) == (name in routers), name
        if stats is not None:
            assert stats.loss == pytest.approx(wanted.loss, abs=1e-5)
            assert stats.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)


def one_step(rank: int, world_size: int, port: int, path: Path) -> Any:
    coefs: dict[str, Any] = {"router_aux_loss_coef": 0.1, "router_sequence_aux_loss_coef": 0.2}
    model = ModelConfig(path=str(path / "qwen3_moe"))
    return step(make_actor(rank, world_size, port, model, ParallelConfig(), **coefs)).metrics


def balance(chosen_TE: torch.Tensor, scores_TE: torch.Tensor) -> float:
    """Return E * sum over experts of (share of choices * mean score)."""
    share_E = chosen_TE.sum(0) / chosen_TE.sum()
    return (chosen_TE.shape[1] * share_E * scores_TE.mean(0)).sum().item()


def test_loads_and_losses_are_those_of_transformers_routers(models: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models / "qwen3_moe", dtype=torch.float32)
    layers, load_LE = (0, 2, 3), torch.zeros(4, 8)
    sequence_loss = batch_loss = 0.0
    for batch in make_batches():
        chosen, scores = [[], [], []], [[], [], []]
        for ids in batch.token_ids_T.split(list(batch.lens_N)):
            with torch.no_grad():
                logits = model(ids[None], output_router_logits=True).router_logits
            for i, logits_TE in enumerate(logits):
                scores_TE = logits_TE.softmax(-1)
                chosen_TE = torch.zeros_like(scores_TE).scatter(1, scores_TE.topk(2).indices, 1.0)
                sequence_loss += len(ids) * balance(chosen_TE, scores_TE)
                chosen[i].append(chosen_TE)
                scores[i].append(scores_TE)
        for i, layer in enumerate(layers):
            load_LE[layer] += torch.cat(chosen[i]).sum(0)
            batch_loss += sum(batch.lens_N) * balance(torch.cat(chosen[i]), torch.cat(scores[i]))
    metrics = run_ranks(one_step, 1, models)[0]
    assert metrics["router/seq_aux_loss"] == pytest.approx(sequence_loss / NUM_TOKENS / 3, rel=1e-4)
    assert metrics["router/aux_loss"] == pytest.approx(batch_loss / NUM_TOKENS / 3, rel=1e-4)
    for layer in layers:
        busiest, mean = load_LE[layer].max().item(), 2 * NUM_TOKENS / 8
        assert metrics[f"router/layer_{layer:02d}/max_violation"] == pytest.approx(
            busiest / mean - 1
        )
    assert not [name for name in metrics if "layer_01" in name]
