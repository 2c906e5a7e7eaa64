"""Steps of DPO on real ranks: the gradient of the published loss, however pairs are spread."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mcore_rl.config import (
    CheckpointConfig,
    ModelConfig,
    ParallelConfig,
    PreferenceConfig,
    TrainConfig,
)
from mcore_rl.data.preferences import make_pair_batch
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.loops.dpo import with_pair_gradient
from mcore_rl.run.roles.trainer import PackedTokenTrainer, Packing
from mcore_rl.types import TrainBatch
from tests.support.calls_together import CallsTogether
from tests.support.distributed import run_ranks
from tests.support.gradients import boxed_gradients, check_gradients, whole_gradients
from tests.support.tiny_training import VOCAB, make_actor, write_hf_model

BETA = 0.5
LAYOUTS = [({"cp": 2}, 40), ({"dp": 2, "ep": 1}, 16), ({"pp": 2}, 24)]
"""(layout, train.max_tokens_per_microbatch); none keeps all pairs in one micro-batch."""
STRETCH = 1.1
TOLERANCE = 2e-6
"""Tolerance of float32 gradients between layouts. One process was 1.7e-6 away from float64, CP 2
was 1.4e-6, and they were 1.0e-6 away from each other.
"""


def make_pairs() -> TrainBatch:
    generator = torch.Generator().manual_seed(4)
    pairs = []
    for prompt_len, lens in ((3, (4, 9)), (5, (2, 2)), (2, (12, 1)), (4, (6, 8)), (3, (5, 3))):
        prompt, *answers = (
            torch.randint(0, VOCAB, (n,), generator=generator) for n in (prompt_len, *lens)
        )
        pairs.append(tuple((tuple(torch.cat([prompt, a]).tolist()), prompt_len) for a in answers))
    return make_pair_batch(pairs)


def one_step(
    rank: int,
    world_size: int,
    port: int,
    model: ModelConfig,
    layout: dict[str, Any],
    max_tokens: int,
) -> Any:
    """Take a step of a policy whose weights are STRETCH times the reference's.

    Returns (metrics of the pairs, metrics of the step, gradients in boxes).
    """
    parallel = ParallelConfig(**layout)
    actor = make_actor(rank, world_size, port, model, parallel, router_aux_loss_coef=0.0)
    actor.snapshot_reference()
    with torch.no_grad():
        for parameter in actor.weight_layout()[1].values():
            parameter.mul_(STRETCH)
    trainer = PackedTokenTrainer(
        CallsTogether(actor),
        RunFolder("unused"),
        packing=Packing.from_config(parallel, TrainConfig(max_tokens_per_microbatch=max_tokens)),
        temperature=1.0,
        checkpoint=CheckpointConfig(),
    )
    batch, metrics = with_pair_gradient(make_pairs(), trainer, PreferenceConfig("dpo", BETA))
    stats = trainer.train_step(batch)
    return metrics, stats.metrics, boxed_gradients(actor)


def all_layouts(rank: int, world_size: int, port: int, model: ModelConfig) -> list[Any]:
    return [one_step(rank, world_size, port, model, *layout) for layout in LAYOUTS]


def response_logprobs(model: torch.nn.Module, batch: TrainBatch) -> list[Tensor]:
    """Return log p(response | prompt) of each sequence, computed one sequence at a time."""
    out = []
    parts = zip(
        batch.token_ids_T.split(batch.lens_N), batch.loss_mask_T.split(batch.lens_N), strict=True
    )
    for ids, mask in parts:
        log_p = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        out.append(log_p[mask[1:]].sum())
    return out


def published_step(hf_dir: Path) -> tuple[float, Any]:
    """Return (loss, policy with gradients) of DPO, equation 7, with transformers in float64."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
    reference = AutoModelForCausalLM.from_pretrained(hf_dir, **options)
    policy = AutoModelForCausalLM.from_pretrained(hf_dir, **options)
    batch = make_pairs()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(STRETCH)
        ref = response_logprobs(reference, batch)
    ours = response_logprobs(policy, batch)
    h = [a - b for a, b in zip(ours, ref, strict=True)]
    pairs = zip(h[::2], h[1::2], strict=True)
    losses = [-logsigmoid(BETA * (chosen - rejected)) for chosen, rejected in pairs]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), policy


@pytest.mark.gloo
def test_the_gradient_is_that_of_the_published_loss_in_every_layout(tmp_path: Path) -> None:
    hf_dir = write_hf_model(tmp_path / "model")
    model = ModelConfig(path=str(hf_dir))
    metrics, stats, gradients = run_ranks(one_step, 1, model, {}, 1024)[0]
    wanted = whole_gradients(gradients)
    loss, policy = published_step(hf_dir)
    assert metrics["preference/loss"] == pytest.approx(loss, abs=1e-5)
    assert abs(metrics["preference/margin"]) > 0.05 and 0 < metrics["preference/accuracy"] <= 1
    assert stats["ratio/token_max"] == pytest.approx(1, abs=1e-5)
    largest = max(g.abs().max().item() for g in wanted.values())
    compared = 0
    for name, parameter in policy.named_parameters():
        if name in wanted and parameter.grad is not None:
            assert (parameter.grad - wanted[name]).abs().max() <= 1e-4 * largest, name
            compared += 1
    assert compared > 20

    per_rank = run_ranks(all_layouts, 2, model, timeout_s=300)
    for (layout, _), results in zip(LAYOUTS, zip(*per_rank, strict=True), strict=True):
        assert all(got == pytest.approx(metrics, abs=1e-5) for got, *_ in results), layout
        check_gradients([boxed for *_, boxed in results], wanted, layout, TOLERANCE)
