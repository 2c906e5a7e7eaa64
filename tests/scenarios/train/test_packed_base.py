"""Factors over a base in INT4 or block FP8, which a rank keeps as the files have it."""

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
from tests.support.tiny_kimi_k25 import write_int4_kimi_k25_model
from tests.support.tiny_training import (
    NUM_TOKENS,
    VOCAB,
    make_actor,
    my_batches,
    token_loss,
    write_hf_model,
)

LORA = LoraConfig(rank=4, alpha=8.0)
LAYOUTS = [
    pytest.param(1, {}, id="one"),
    pytest.param(2, {"tp": 2, "ep": 2}, id="experts", marks=pytest.mark.slow),
    pytest.param(2, {"tp": 2, "etp": 2}, id="parts", marks=pytest.mark.slow),
    pytest.param(2, {"pp": 2}, id="stages", marks=pytest.mark.slow),
]
ODD = {
    "hidden_size": 192,
    "intermediate_size": 200,
    "moe_intermediate_size": 144,
    "head_dim": 48,
}
"""Sizes at which all blocks but the first of a matrix are cut, by tensor parallelism too."""
Outcome = tuple[list[list[Tensor]], dict[str, Tensor], int, int]
"""Log-probs of three passes; frozen weights and factors; bytes of the former, and packed ones."""


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
    packed = sum(kept.part.nbytes for parts in frozen.packed.values() for kept in parts)
    return passes, read_adapter(actor), frozen.own_bytes, packed


def read_adapter(actor: Any) -> dict[str, Tensor]:
    """Return what a sender would send of the weights below the factors, and the factors."""
    layouts = actor.adapter_layouts()
    shards, tensors = actor.select_served_layout()
    unadapted = actor.without_adapter
    sender = WeightSender(shards, tensors, 0, adapter=layouts, unadapted=unadapted)
    base, held = layouts["base"]
    assert sender._is_base_live == bool(actor._adapter.frozen.packed)
    with actor.without_adapter():
        sent = {f"{s.box.name} {s.box.start}": s.view(held).clone() for s in base}
    _, factors = layouts["factors"]
    assert any(tensor.any() for name, tensor in factors.items() if name.endswith("_B"))
    return sent | {name: tensor.clone() for name, tensor in factors.items() if name != "stamp"}


@pytest.fixture(scope="module", params=[pytest.param("int4", marks=pytest.mark.slow), "fp8"])
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    """A model in few bits, and the same one in bfloat16."""
    folder = tmp_path_factory.mktemp("packed")
    source, plain = folder / request.param, folder / "plain"
    if request.param == "int4":
        write_int4_kimi_k25_model(source, vocab_size=VOCAB + 1)
    else:
        whole = write_hf_model(folder / "whole", **ODD)
        assert main(["to-fp8", str(whole), str(source), "--workers", "1"]) == 0
    assert main(["dequantize", str(source), str(plain), "--workers", "1"]) == 0
    return str(source), str(plain)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("num_ranks", "layout"), LAYOUTS)
@pytest.mark.gloo
def test_a_packed_base_computes_what_its_plain_weights_do(
    folders: tuple[str, str], dtype: Any, num_ranks: int, layout: Any
) -> None:
    models = [ModelConfig(path=path, dtype=dtype) for path in folders]
    runs = [run_ranks(train, num_ranks, model, layout) for model in models]
    config = Config(
        model=models[0], parallel=ParallelConfig(**layout), train=TrainConfig(lora=LORA)
    )
    planned = list_frozen_bytes(PlannedRun.make(config))
    for packed, plain in zip(*runs, strict=True):
        for got, want in zip(packed[0], plain[0], strict=True):
            assert len(got) == len(want) and all(map(torch.equal, got, want))
        assert packed[1].keys() == plain[1].keys()
        assert all(torch.equal(value, plain[1][name]) for name, value in packed[1].items())
        assert packed[3] > 0 and plain[3] == 0
        assert packed[2] < 0.6 * plain[2]
    each = num_ranks // len(planned)
    held = [packed[2] for packed in runs[0]]
    assert [max(held[first : first + each]) for first in range(0, num_ranks, each)] == planned
