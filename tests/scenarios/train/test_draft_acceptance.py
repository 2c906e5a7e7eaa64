"""Trained layers for multi-token prediction are accepted more often than those they began as."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from mcore_rl.train.actor import Actor
from mcore_rl.types import StepStats, TrainBatch
from tests.support.distributed import run_ranks
from tests.support.tiny_mtp import list_mtp_names, load_weights, save_weights, write_mtp_model
from tests.support.tiny_training import VOCAB, make_actor, token_loss

LENS = (9, 14, 6, 11)
PROMPT_LEN = 3
STEPS = 50


def make_batch(step: int) -> TrainBatch:
    """Return sequences that count upward, each by one, from where the step begins."""
    parts = [(torch.arange(n) + 7 * step + 11 * i) % VOCAB for i, n in enumerate(LENS)]
    mask_T = torch.cat([torch.arange(n) >= PROMPT_LEN for n in LENS])
    return TrainBatch(
        token_ids_T=torch.cat(parts),
        loss_mask_T=mask_T,
        lens_N=LENS,
        loss_weights_T=mask_T / mask_T.sum(),
        advantages_T=torch.ones(sum(LENS)),
    )


def train(actor: Actor, first: int, count: int) -> list[StepStats]:
    stats = [
        actor.train_step([make_batch(k)], token_loss, temperature=1.0, num_tokens=sum(LENS))
        for k in range(first, first + count)
    ]
    return [step for step in stats if step is not None]


def run(rank: int, world_size: int, port: int, folder: Path) -> dict[str, Any]:
    """Train a model and its layers, then measure these beside those of the beginning."""

    def start(path: Path) -> Actor:
        optimizer = OptimizerConfig(lr=1e-2, clip_grad=1.0)
        model = ModelConfig(path=str(path))
        return make_actor(rank, world_size, port, model, ParallelConfig(), optimizer, mtp_loss=0.3)

    actor = start(folder / "begun")
    steps = train(actor, 0, STEPS)
    actor.export_hf(folder / "trained")
    trained = load_weights(folder / "trained")
    begun = load_weights(folder / "begun")
    names = list_mtp_names(folder / "begun")
    actor.export_hf(folder / "frozen")
    for file in (folder / "frozen").glob("*.safetensors*"):
        file.unlink()
    save_weights(folder / "frozen", trained | {name: begun[name] for name in names})
    [of_trained] = train(start(folder / "trained"), STEPS, 1)
    [of_frozen] = train(start(folder / "frozen"), STEPS, 1)
    return {
        "steps": steps,
        "trained": of_trained,
        "frozen": of_frozen,
        "changed": {name for name in begun if not torch.equal(begun[name], trained[name])},
        "names": names,
        "copies": [torch.equal(*(trained[n] for n in pair)) for pair in COPIES],
    }


COPIES = (
    ("model.layers.4.embed_tokens.weight", "model.embed_tokens.weight"),
    ("model.layers.4.shared_head.head.weight", "lm_head.weight"),
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("drafts")
    write_mtp_model("deepseek_v3", folder / "begun")
    return run_ranks(run, 1, folder, timeout_s=300)[0]


@pytest.mark.slow
@pytest.mark.gloo
def test_trained_layers_are_accepted_more_often(result: dict[str, Any]) -> None:
    first, last = result["steps"][0].metrics, result["steps"][-1].metrics
    assert last["mtp/loss"] < 0.5 * first["mtp/loss"]
    trained, frozen = (result[name].metrics for name in ("trained", "frozen"))
    assert result["trained"].loss == result["frozen"].loss, "another policy"
    assert trained["mtp/loss"] < 0.5 * frozen["mtp/loss"]
    assert frozen["mtp/acceptance"] < 0.2 < 0.3 < trained["mtp/acceptance"]


@pytest.mark.slow
@pytest.mark.gloo
def test_exports_have_trained_layers_and_fresh_copies(result: dict[str, Any]) -> None:
    assert {name for name in result["names"] if not name.endswith("_bias")} <= result["changed"]
    assert result["copies"] == [True, True]
