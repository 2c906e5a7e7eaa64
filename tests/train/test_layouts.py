"""Every layout computes what one process computes: loss, gradients, log-probs; and what transformers does."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.train.actor import Actor
from tests.distributed import run_ranks
from tests.train.tiny import (
    NUM_TOKENS,
    make_actor,
    make_batches,
    my_batches,
    token_loss,
    transformers_logprobs,
    with_engine_records,
    write_hf_model,
)

BATCHES = "batches.pt"

Layout = dict[str, int]
TWO_RANKS: list[Layout] = [
    {"tp": 2},
    {"pp": 2},
    {"ep": 2},
    {"cp": 2},
    {"tp": 2, "ep": 2},
    {"tp": 2, "etp": 2},
    {"pp": 2, "vpp": 2},
    {"dp": 2, "ep": 1},
]
FOUR_RANKS: list[Layout] = [
    {"tp": 2, "ep": 2, "etp": 2},
    {"tp": 2, "pp": 2, "ep": 2},
    {"tp": 2, "cp": 2, "ep": 4},
    {"pp": 2, "cp": 2, "vpp": 2},
]


def run_layout(rank: int, world_size: int, port: int, model: ModelConfig, layout: Layout) -> dict[str, Any]:
    """One step in a layout; what its owning ranks report, and every gradient by HF name in boxes."""
    actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout))
    batches = my_batches(torch.load(Path(model.path) / BATCHES, weights_only=False))
    scores = actor.compute_logprobs(batches, temperature=0.8, sum_squares=True)
    stats = actor.train_step(batches, token_loss, temperature=0.8, num_tokens=NUM_TOKENS)
    gather_gradients(actor)
    shards, _ = actor.weight_layout()
    gradients = {
        f"{i}.{name}": cast(Any, parameter).main_grad
        for i, chunk in enumerate(actor.chunks)
        for name, parameter in _inner(chunk).named_parameters()
    }
    return {
        "layout": layout,
        "dp": dist.get_rank() if stats is None else _dp_rank(),
        "stats": stats,
        "logprobs": scores and [score.logprobs_T for score in scores],
        "squares": scores and [_present(score.sum_squares_T) for score in scores],
        "flips": scores and [score.router_flips_T for score in scores],
        "gradients": [(shard.box, shard.view(gradients).clone()) for shard in shards],
    }


def run_layouts(
    rank: int, world_size: int, port: int, model: ModelConfig, layouts: list[Layout]
) -> list[Any]:
    return [run_layout(rank, world_size, port, model, layout) for layout in layouts]


def gather_gradients(actor: Actor) -> None:
    """Undo the distributed optimizer's reduce-scatter: whole gradients on every rank."""
    for chunk in actor.chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather(list(bucket.grad_data.chunk(group.size())), mine, group=group)


def _inner(chunk: torch.nn.Module) -> torch.nn.Module:
    from megatron.core.utils import unwrap_model

    return unwrap_model(chunk)


def _present(value: torch.Tensor | None) -> torch.Tensor:
    assert value is not None
    return value


def _dp_rank() -> int:
    from megatron.core import parallel_state as ps

    return ps.get_data_parallel_rank()


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_and_batches(tmp_path_factory.mktemp("model"))


def write_model_and_batches(folder: Path, **overrides: object) -> Path:
    """The model, and beside it the batches as an engine of that model would have sampled them."""
    write_hf_model(folder, **overrides)
    batches, _ = with_engine_records(make_batches(), folder)
    torch.save(batches, folder / BATCHES)
    return folder


@pytest.fixture(scope="module")
def one_process(hf_dir: Path) -> dict[str, Any]:
    return run_ranks(run_layout, 1, ModelConfig(path=str(hf_dir)), {})[0]


def global_gradients(one_process: dict[str, Any]) -> dict[str, torch.Tensor]:
    """HF name -> gradient, put together from the boxes of one process."""
    whole: dict[str, torch.Tensor] = {}
    for box, gradient in one_process["gradients"]:
        start = whole.get(box.name, torch.empty(0))
        if start.shape != torch.Size(box.stop):
            grown = torch.zeros(tuple(max(a, b) for a, b in zip(box.stop, _shape(start, box), strict=True)))
            if start.numel():
                grown[tuple(map(slice, start.shape))] = start
            whole[box.name] = grown
        whole[box.name][tuple(map(slice, box.start, box.stop))] = gradient
    return whole


def _shape(tensor: torch.Tensor, box: Any) -> tuple[int, ...]:
    return tuple(tensor.shape) if tensor.numel() else (0,) * len(box.stop)


@pytest.mark.gloo
@pytest.mark.parametrize("layouts", [TWO_RANKS, FOUR_RANKS], ids=["two_ranks", "four_ranks"])
def test_layouts_agree_with_one_process(
    hf_dir: Path, one_process: dict[str, Any], layouts: list[Layout]
) -> None:
    check_layouts(ModelConfig(path=str(hf_dir)), one_process, layouts)


@pytest.mark.gloo
def test_tied_embeddings_agree_with_one_process(tmp_path: Path) -> None:
    model = ModelConfig(path=str(write_model_and_batches(tmp_path, tie_word_embeddings=True)))
    check_layouts(model, run_ranks(run_layout, 1, model, {})[0], [{"pp": 2}, {"tp": 2}])


def check_layouts(model: ModelConfig, one_process: dict[str, Any], layouts: list[Layout]) -> None:
    world_size = ParallelConfig(**layouts[0]).world_size
    per_rank = run_ranks(run_layouts, world_size, model, layouts, timeout_s=300)
    wanted = global_gradients(one_process)
    largest = max(g.abs().max().item() for g in wanted.values())
    for results in zip(*per_rank, strict=True):
        layout = results[0]["layout"]
        check_reports(results, one_process, layout)
        covered: dict[str, int] = {}
        for result in results:
            for box, gradient in result["gradients"]:
                difference = (gradient - wanted[box.name][tuple(map(slice, box.start, box.stop))]).abs().max()
                assert difference <= 1e-6 * largest, (layout, box, difference.item(), largest)
                covered[box.name] = covered.get(box.name, 0) + box.numel
        assert all(covered[name] >= g.numel() for name, g in wanted.items()), layout


def check_reports(results: tuple[Any, ...], one_process: dict[str, Any], layout: Layout) -> None:
    owners = sorted((r for r in results if r["stats"] is not None), key=lambda r: r["dp"])
    assert len(owners) == ParallelConfig(**layout).dp_size, layout
    wanted = one_process["stats"]
    for owner in owners:
        stats = owner["stats"]
        assert stats.loss == pytest.approx(wanted.loss, abs=1e-6), layout
        assert stats.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6), layout
        assert stats.metrics == pytest.approx(wanted.metrics, abs=2e-6), layout
    for dp, owner in enumerate(owners):
        flips = zip(owner["flips"], one_process["flips"][dp :: len(owners)], strict=True)
        assert all(torch.equal(got, want) for got, want in flips), layout
        for name in ("logprobs", "squares"):
            for got, want in zip(owner[name], one_process[name][dp :: len(owners)], strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=3e-6, msg=lambda m: f"{layout}: {m}")


def test_router_flips_are_those_put_in(hf_dir: Path, one_process: dict[str, Any]) -> None:
    batches, flips = with_engine_records(make_batches(), hf_dir)
    assert {0, 1, 2} == set(torch.cat(flips).tolist())
    for got, want in zip(one_process["flips"], flips, strict=True):
        assert torch.equal(got, want)

    metrics = one_process["stats"].metrics
    mask_T = torch.cat([batch.loss_mask_T for batch in batches])
    stale_T = torch.cat([_present(batch.stale_T) for batch in batches])
    router_T = (torch.cat(flips) > 0) & ~stale_T
    rollout_T = torch.cat([_present(batch.rollout_logprobs_T) for batch in batches])
    difference_T = (torch.cat(one_process["logprobs"]) - rollout_T).abs()
    shares = {"stale": stale_T, "router": router_T, "arithmetic": ~stale_T & ~router_T}
    for name, where_T in shares.items():
        want = difference_T[mask_T & where_T].sum() / mask_T.sum()
        assert metrics[f"logprob_diff/{name}"] == pytest.approx(want.item(), rel=1e-4), name
    flipped = (torch.cat(flips)[mask_T] > 0).float().mean().item()
    assert metrics["logprob_diff/router_flip_share"] == pytest.approx(flipped)


def test_logprobs_are_those_of_transformers(hf_dir: Path, one_process: dict[str, Any]) -> None:
    for got, want in zip(one_process["logprobs"], transformers_logprobs(hf_dir, 0.8), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
