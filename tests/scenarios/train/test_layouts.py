"""Loss, gradients and log-probs of every layout are those of one process and of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.types import LogprobOptions
from tests.support.distributed import run_each, run_ranks
from tests.support.gradients import boxed_gradients, check_gradients, whole_gradients
from tests.support.tiny_training import (
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

Layout = dict[str, Any]
TWO_RANKS: list[Layout] = [
    {"cp": 2},
    {"tp": 2, "ep": 2},
    {"pp": 2, "vpp": 2},
    {"dp": 2, "ep": 1},
]
MORE_TWO_RANKS: list[Layout] = [{"tp": 2}, {"pp": 2}, {"ep": 2}, {"tp": 2, "etp": 2}]
FOUR_RANKS: list[Layout] = [
    {"tp": 2, "ep": 2, "etp": 2},
    {"tp": 2, "pp": 2, "ep": 2},
    {"tp": 2, "cp": 2, "ep": 4},
    {"pp": 2, "cp": 2, "vpp": 2},
]


def run_layout(
    rank: int, world_size: int, port: int, model: ModelConfig, layout: Layout
) -> dict[str, Any]:
    """Take a step in a layout; return this rank's reports and its gradients in boxes."""
    coefs: dict[str, Any] = {"router_aux_loss_coef": 0.1, "router_sequence_aux_loss_coef": 0.2}
    actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout), **coefs)
    batches = my_batches(torch.load(Path(model.path) / BATCHES, weights_only=False))
    scores = actor.compute_logprobs(batches, LogprobOptions(temperature=0.8, sum_squares=True))
    stats = actor.train_step(batches, token_loss, temperature=0.8, num_tokens=NUM_TOKENS)
    return {
        "dp": dist.get_rank() if stats is None else _dp_rank(),
        "stats": stats,
        "logprobs": scores and [score.logprobs_T for score in scores],
        "squares": scores and [_present(score.sum_squares_T) for score in scores],
        "flips": scores and [score.router_flips_T for score in scores],
        "gradients": boxed_gradients(actor),
    }


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
    """Save a model, and batches as an engine with that model would have sampled them."""
    write_hf_model(folder, **overrides)
    batches, _ = with_engine_records(make_batches(), folder)
    torch.save(batches, folder / BATCHES)
    return folder


@pytest.fixture(scope="module")
def one_process(hf_dir: Path) -> dict[str, Any]:
    return run_ranks(run_layout, 1, ModelConfig(path=str(hf_dir)), {})[0]


@pytest.mark.gloo
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(TWO_RANKS, id="two_ranks"),
        pytest.param(MORE_TWO_RANKS, id="more_two_ranks", marks=pytest.mark.slow),
        pytest.param(FOUR_RANKS, id="four_ranks", marks=pytest.mark.slow),
    ],
)
def test_layouts_agree_with_one_process(
    hf_dir: Path, one_process: dict[str, Any], layouts: list[Layout]
) -> None:
    check_layouts(ModelConfig(path=str(hf_dir)), one_process, layouts)


@pytest.mark.gloo
def test_tied_embeddings_agree_with_one_process(tmp_path: Path) -> None:
    model = ModelConfig(path=str(write_model_and_batches(tmp_path, tie_word_embeddings=True)))
    one_process = run_ranks(run_layout, 1, model, {})[0]
    # The embedding's gradient has two parts, each of which tensor parallelism adds up by ranks.
    check_layouts(model, one_process, [{"pp": 2}, {"tp": 2}], tolerance=2e-6)


def check_layouts(
    model: ModelConfig,
    one_process: dict[str, Any],
    layouts: list[Layout],
    tolerance: float = 1e-6,
) -> None:
    world_size = ParallelConfig(**layouts[0]).world_size
    wanted = whole_gradients(one_process["gradients"])
    per_layout = run_each(run_layout, world_size, layouts, model)
    for layout, results in zip(layouts, per_layout, strict=True):
        check_reports(results, one_process, layout)
        of_ranks = [result["gradients"] for result in results]
        check_gradients(of_ranks, wanted, layout, tolerance)


def check_reports(results: list[Any], one_process: dict[str, Any], layout: Layout) -> None:
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
                torch.testing.assert_close(
                    got, want, rtol=0, atol=3e-6, msg=lambda m: f"{layout}: {m}"
                )


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
