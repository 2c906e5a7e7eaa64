"""Faults before the first checksum, so that the bytes are as sent: those are the parity check's.

A real engine serves what a wrong table, a zeroed gather or an old copy would have sent. Each run
begins with the defaults and has learned nothing. Faults behind the checksums are in
tests/weight_sync/test_destination.py.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from mcore_rl.config import ParityCheckConfig, SyncConfig
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.run.roles.parity_check import ParityCheck
from mcore_rl.run.roles.parity_tolerance import (
    MOST,
    NUM_TO_JUDGE,
    EngineDifference,
    ParityTolerance,
)
from mcore_rl.types import LogprobOptions, TokenScores, TrainBatch, WeightVersion
from mcore_rl.weight_sync.controller.linked_engine import is_read_back
from tests.support.engine_keys import KEYS
from tests.support.engines import VOCAB_SIZE, save_tiny_moe
from tests.support.stored import fetch_nothing
from tests.support.sync_stage import call

pytestmark = pytest.mark.e2e

TIMEOUT_S = 60.0
NUM_SEQUENCES = 16
LEN = 96

Weights = dict[str, Tensor]
Plant = Callable[[Weights], None]


def give_an_expert_the_weights_of_another(weights: Weights) -> None:
    for projection in ("gate", "up", "down"):
        expert = "model.layers.1.mlp.experts.{}." + f"{projection}_proj.weight"
        weights[expert.format(3)] = weights[expert.format(4)].clone()


def zero_a_slice(weights: Weights) -> None:
    """An eighth of the columns, as if one tensor-parallel rank of eight had not filled its part."""
    weights["model.layers.1.self_attn.o_proj.weight"][:, :8] = 0


def take_old_weights(weights: Weights) -> None:
    """Each weight is off by a hundredth of its spread, as after a hundred steps or so."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator)
        weights[name] = (tensor + 0.01 * tensor.float().std() * noise).to(tensor.dtype)


PLANTS: Mapping[str, Plant] = {
    "expert": give_an_expert_the_weights_of_another,
    "zeroed slice": zero_a_slice,
    "stale": take_old_weights,
}


class TransformersTrainer:
    """transformers in the place of the training ranks."""

    def __init__(self, path: Path) -> None:
        self._model = Qwen3MoeForCausalLM.from_pretrained(path, dtype="auto").eval()

    @torch.no_grad()
    def compute_logprobs(
        self, batch: TrainBatch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores:
        parts = []
        for tokens_T in batch.token_ids_T.split(list(batch.lens_N)):
            logprobs_TV = self._model(tokens_T[None]).logits[0].float().log_softmax(-1)
            own_T = logprobs_TV[:-1].gather(-1, tokens_T[1:, None])[:, 0]
            parts += [torch.zeros(1), own_T]
        return TokenScores(torch.cat(parts))


def make_batch(seed: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(3, VOCAB_SIZE, (NUM_SEQUENCES * LEN,), generator=generator)
    return TrainBatch(ids_T, torch.ones(len(ids_T)).bool(), (LEN,) * NUM_SEQUENCES)


class Run:
    """The syncs of a run with the options' defaults, each of another batch."""

    def __init__(self, engine: EngineProcess, folder: Path, dtype: str) -> None:
        self._url = engine.url
        self._folder = folder
        self.tolerance = ParityTolerance(ParityCheckConfig(), dtype)
        self.num_syncs = 0
        self.precision = dtype
        trainer: Any = TransformersTrainer(folder / "right")

        async def ready() -> None: ...

        options = ParityCheckConfig(), self.tolerance, TIMEOUT_S, ready, KEYS
        self._parity_check = ParityCheck(trainer, *options, fetch_nothing)

    def sync(self, name: str) -> tuple[EngineDifference, str | None]:
        """Have the engine serve these weights, read back if it is due; return how it differs, and
        why it gets no requests.
        """
        self._load(name)
        verified = is_read_back(self.num_syncs, SyncConfig().reads_back_every)
        self._parity_check.score_sequences(
            WeightVersion(self.num_syncs), make_batch(self.num_syncs)
        )
        report = asyncio.run(self._parity_check.check([self._url], [self._url] if verified else []))
        self.num_syncs += 1
        return report.differences[self._url], report.failed.get(self._url)

    def _load(self, name: str) -> None:
        """Update the engine's weights; its scheduler may not have let go of answered requests."""
        deadline = time.monotonic() + TIMEOUT_S
        path = str(self._folder / name)
        while not (answer := call(self._url, "/update_weights_from_disk", model_path=path))[
            "success"
        ]:
            assert time.monotonic() < deadline, answer
            time.sleep(0.05)


Start = Callable[[], Run]


@pytest.fixture(
    scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def start(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """Return what begins a run with the engine."""
    folder = tmp_path_factory.mktemp(request.param)
    right = save_tiny_moe(folder / "right", getattr(torch, request.param))
    for name, plant in PLANTS.items():
        weights = load_file(folder / "right" / "model.safetensors")
        plant(weights)
        (folder / name).mkdir()
        for file in ("config.json", "generation_config.json"):
            (folder / name / file).write_bytes((folder / "right" / file).read_bytes())
        save_file(weights, folder / name / "model.safetensors", metadata={"format": "pt"})
    log = str(folder / "engine.log")
    spec = EngineSpec(right, log, dtype=request.param, kv_cache_len=4096, keys=KEYS)
    with EngineProcess(spec) as engine:
        yield lambda: Run(engine, folder, request.param)


def test_right_weights_pass_again_and_again(start: Start) -> None:
    run = start()
    for _ in range(10):
        found, fault = run.sync("right")
        print(f"right: {found}, limits {run.tolerance.limits}")
        assert fault is None


@pytest.mark.parametrize("plant", PLANTS)
def test_the_parity_check_notices_from_the_fifth_sync_on_what_was_sent_wrong(
    start: Start, plant: str
) -> None:
    run = start()
    for _ in range(NUM_TO_JUDGE):
        assert run.sync("right")[1] is None
    found, fault = run.sync(plant)
    limits = run.tolerance.limits
    print(f"{plant}: {found}, limits {limits}")
    assert NUM_TO_JUDGE == 4
    assert fault is not None and "claims weights 4" in fault
    assert found.typical > limits["typical"][1] or found.overall > limits["overall"][1]
    assert found.overall < MOST["bfloat16"], "a fixed bound of bfloat16 would let it pass"
    assert run.sync("right")[1] is None


@pytest.mark.parametrize("plant", PLANTS)
def test_the_first_sync_shows_faults_in_float32_alone(start: Start, plant: str) -> None:
    """In bfloat16, what the first sync shows is taken as usual: other checks find faults there."""
    run = start()
    _, fault = run.sync(plant)
    assert (fault is not None) == (run.precision == "float32")
