"""Factors over a base in INT4, which a rank keeps as the files have it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_tools.cli import main
from mcore_rl.config import Config, LoraConfig, ModelConfig, ParallelConfig, TrainConfig
from mcore_rl.planning.adapter_memory import list_frozen_bytes
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.types import LogprobOptions
from mcore_rl.weight_sync.sender import WeightSender
from tests.support.distributed import run_ranks
from tests.support.tiny_kimi_k25 import write_kimi_k25_model
from tests.support.tiny_training import (
    NUM_TOKENS,
    VOCAB,
    make_actor,
    my_batches,
    token_loss,
)

LORA = LoraConfig(rank=4, alpha=8.0)
CASES = [
    pytest.param(1, {}, True, id="one"),
    pytest.param(2, {"tp": 2, "ep": 2}, True, id="experts", marks=pytest.mark.slow),
    pytest.param(2, {"tp": 2, "etp": 2}, True, id="parts", marks=pytest.mark.slow),
]
Outcome = tuple[list[list[Tensor]], dict[str, Tensor], int, int]
"""Log-probs of three passes, the weights below the factors, W0's bytes and those in INT4."""


def train(rank: int, world_size: int, port: int, model: ModelConfig, layout: Any) -> Outcome:
    options: dict[str, Any] = {"lora": LORA, "router_aux_loss_coef": 0.0}
    parallel = ParallelConfig(**layout)
    actor = make_actor(rank, world_size, port, model, parallel, **options)
    batches = my_batches()

    def score(*, reference: bool) -> list[Tensor]:
        how = LogprobOptions(temperature=1.0, reference=reference)
        return [score.logprobs_T for score in actor.compute_logprobs(batches, how) or []]

    passes = [score(reference=False)]
    for _ in range(2):
        actor.train_step(batches, token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
    passes += [score(reference=False), score(reference=True)]
    assert actor._adapter is not None
    frozen = actor._adapter.frozen
    packed = sum(part.nbytes for parts in frozen.packed.values() for part in parts)
    return passes, read_base(actor), frozen.own_bytes, packed


def read_base(actor: Any) -> dict[str, Tensor]:
    """Return what a sender would send of the weights below the factors."""
    layouts = actor.adapter_layouts()
    shards, tensors = actor.select_served_layout()
    unadapted = actor.without_adapter
    sender = WeightSender(shards, tensors, 0, adapter=layouts, unadapted=unadapted)
    base, held = layouts["base"]
    assert sender._is_base_live == bool(actor._adapter.frozen.packed)
    with actor.without_adapter():
        return {f"{s.box.name} {s.box.start}": s.view(held).clone() for s in base}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model in INT4, and the same one in bfloat16."""
    folder = tmp_path_factory.mktemp("packed")
    source = write_kimi_k25_model(folder / "int4", vocab_size=VOCAB + 1)
    assert main(["dequantize", str(source), str(folder / "plain")]) == 0
    return str(source), str(folder / "plain")


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("num_ranks", "layout", "is_packed"), CASES)
@pytest.mark.gloo
def test_a_base_in_int4_computes_what_its_plain_weights_do(
    folders: tuple[str, str], dtype: Any, num_ranks: int, layout: Any, is_packed: bool
) -> None:
    models = [ModelConfig(path=path, dtype=dtype) for path in folders]
    runs = [run_ranks(train, num_ranks, model, layout) for model in models]
    config = Config(
        model=models[0], parallel=ParallelConfig(**layout), train=TrainConfig(lora=LORA)
    )
    [planned] = list_frozen_bytes(PlannedRun.make(config))
    for packed, plain in zip(*runs, strict=True):
        for got, want in zip(packed[0], plain[0], strict=True):
            assert len(got) == len(want) and all(map(torch.equal, got, want))
        assert packed[1].keys() == plain[1].keys()
        assert all(torch.equal(value, plain[1][name]) for name, value in packed[1].items())
        assert (packed[3] > 0) == is_packed and plain[3] == 0
        assert packed[2] == planned < 0.6 * plain[2]
