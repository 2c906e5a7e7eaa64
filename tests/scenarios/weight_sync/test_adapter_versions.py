"""Versions of an adapter on a real SGLang engine, while a response is drawn and after it."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mcore_rl.cluster.adapter_slots import make_adapter_slots
from mcore_rl.config import LoraConfig
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.weight_sync.controller.engine_control import LOADER
from mcore_rl.weight_sync.controller.factor_sync import FactorOptions
from mcore_rl.weight_sync.controller.sync import SyncController
from mcore_rl.weight_sync.sender import WeightSender
from mcore_rl.weights.box import Box, Shard, contiguous_strides
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.lora.base import compute_base_sum
from mcore_rl.weights.lora.facts import AdapterFacts
from mcore_rl.weights.lora.places import Content, Held, make_stamp_shard
from mcore_rl.weights.lora.product import add_product
from tests.support.engine_keys import KEYS
from tests.support.sync_stage import (
    PROMPT,
    generate,
    generate_across,
    logprob_error,
    served_version,
)
from tests.support.thread_engines import ThreadTrainers
from tests.support.tiny_models import write_model

pytestmark = pytest.mark.e2e
EXACT = 1e-4
"""Rounding over 200 tokens reaches 1.3e-5; another version is off by more than 1e-2."""
MAX_LEN = 2048
LORA = LoraConfig(
    rank=4,
    rslora=True,
    sync="adapter",
    # SGLang gets zeros for joined projections without factors.
    targets=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
)


def make_shard(name: str, tensor: Tensor) -> Shard:
    shape = tuple(tensor.shape)
    box = Box(name, (0,) * len(shape), shape)
    return Shard(box, name, 0, contiguous_strides(shape), "float32")


class OneTrainer(ThreadTrainers):
    """One trainer rank with merged weights and whole factors, in a thread of this process."""

    def __init__(self, base: Path, facts: AdapterFacts) -> None:
        self.world_size = 1
        self.calls = []
        self._folder = base
        self._facts = facts
        self._base = load_file(base / "model.safetensors")
        self._weights = {name: tensor.clone() for name, tensor in self._base.items()}
        config = ModelFacts.read(str(base)).config
        stamp = torch.tensor(facts.make_stamp(config).encode())
        self._factors = {"stamp": stamp} | {
            name: torch.zeros(shape) for name, shape in facts.list_factor_shapes(config).items()
        }
        shards = [make_shard(name, tensor) for name, tensor in self._weights.items()]
        places = [make_stamp_shard("stamp")]
        places += [make_shard(name, t) for name, t in self._factors.items() if name != "stamp"]
        held: dict[Content, Held] = {"factors": (places, self._factors)}
        self._senders = [
            WeightSender(shards, self._weights, 0, adapter=held, unadapted=self._show_base)
        ]

    @contextmanager
    def _show_base(self) -> Iterator[None]:
        merged = {name: tensor.clone() for name, tensor in self._weights.items()}
        for name, tensor in self._base.items():
            self._weights[name].copy_(tensor)
        yield
        for name, tensor in merged.items():
            self._weights[name].copy_(tensor)

    def load(self, version: int) -> None:
        """Draw the factors of `version`, and merge them."""
        generator = torch.Generator().manual_seed(version)
        for name, factor in self._factors.items():
            if name != "stamp":
                factor.normal_(std=0.1, generator=generator)
        for name, tensor in self._base.items():
            self._weights[name].copy_(tensor)
            if f"{name}.A" in self._factors:
                pair = self._factors[f"{name}.A"], self._factors[f"{name}.B"]
                add_product(self._weights[name], *pair, self._facts.scale)

    def write(self, folder: Path) -> Path:
        """Write the merged weights as a HuggingFace directory."""
        shutil.copytree(self._folder, folder)
        save_file(self._weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


@dataclass
class Stage:
    """An engine, its trainer, and the merged weights of each version that was synced."""

    base: Path
    engine: EngineProcess
    trainer: OneTrainer
    controller: SyncController
    folder: Path
    merged: dict[int, Path] = field(default_factory=dict)

    def prepare(self, version: int) -> None:
        self.trainer.load(version)
        self.merged[version] = self.trainer.write(self.folder / f"merged{version}")

    def sync(self, version: int) -> Any:
        return asyncio.run(self.controller.sync(version))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("versions")
    base = write_model("qwen3", folder / "base", max_position_embeddings=MAX_LEN)
    policy = ModelFacts.read(str(base))
    engine = EngineProcess(
        EngineSpec(
            str(base),
            str(folder / "engine.log"),
            kv_cache_len=4096,
            max_running=8,
            custom_weight_loaders=(LOADER,),
            keys=KEYS,
            adapters=make_adapter_slots(LORA, policy, has_trainer=True),
        )
    )
    engine.start()
    try:
        facts = AdapterFacts.make(LORA, policy.config, compute_base_sum(base), str(base))
        trainer = OneTrainer(base, facts)
        controller = SyncController(
            trainer,
            timeout_s=60.0,
            verify_every=1,
            keys=KEYS,
            loaded=True,
            factors=[FactorOptions(facts.make_stamp(policy.config), name=LORA.name)],
        )
        engine.wait_healthy()
        yield Stage(base, engine, trainer, controller, folder)
    finally:
        engine.stop()


def check_spans(answer: Any, merged: dict[int, Path]) -> None:
    """Each token has the log-prob of the weights of the version that it is labeled with."""
    meta = answer["meta_info"]
    spans = meta["weight_versions"]
    assert [span["version"] for span in spans] == ["1", "2"]
    own_T = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
    drawn_T = torch.tensor(answer["output_ids"])
    for span in spans:
        folder = merged[int(span["version"])]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            ids = torch.tensor([[*PROMPT, *answer["output_ids"]]])
            logprobs_TV = model(ids).logits[0].log_softmax(-1)
        expected_T = logprobs_TV[len(PROMPT) - 1 : -1].gather(1, drawn_T[:, None])[:, 0]
        part = slice(span["start"], span["end"])
        assert (own_T[part] - expected_T[part]).abs().max() < EXACT, span


def test_versions_of_an_adapter_reach_requests_in_flight_and_no_older_prefix(stage: Stage) -> None:
    url = stage.engine.url
    assert "has no version yet" in str(generate(url))
    asyncio.run(stage.controller.connect([url]))
    stage.prepare(1)
    whole = stage.sync(1)
    assert whole.verified == {url}
    at_base = generate(url, lora_path="base")
    assert logprob_error(stage.base, at_base) < EXACT < logprob_error(stage.merged[1], at_base)
    answer = generate(url)
    assert logprob_error(stage.merged[1], answer) < EXACT < logprob_error(stage.base, answer)
    assert generate(url, lora_path="policy")["output_ids"] == answer["output_ids"]
    assert "lora_path='another': one of policy, base" in str(generate(url, lora_path="another"))

    stage.prepare(2)
    reports = []
    most = MAX_LEN - len(PROMPT) - 1  # the answer ends earlier, unless the sync waits for it
    moved = generate_across(url, lambda: reports.append(stage.sync(2)), most, until="2")
    assert not reports[0].failed
    check_spans(moved, stage.merged)
    # The prompt's prefix was cached with the version before, and with the weights alone.
    assert logprob_error(stage.merged[2], generate(url)) < EXACT
    # Bits of log-probs may differ, as the prompt is in the cache now.
    again = generate(url, lora_path="base")
    assert again["output_ids"] == at_base["output_ids"]
    assert logprob_error(stage.base, again) < EXACT < logprob_error(stage.merged[2], again)
    assert served_version(url) == "2"

    asyncio.run(stage.controller.connect([url]))
    stage.prepare(3)
    relinked = stage.sync(3)
    assert not relinked.failed
    assert logprob_error(stage.merged[3], generate(url)) < EXACT
