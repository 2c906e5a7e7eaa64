"""Adapters that Megatron ranks train in turns: one engine serves each as it is alone."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint_tools.cli import main
from mcore_rl.cluster.adapter_slots import make_adapter_slots
from mcore_rl.config import AdapterConfig, Config, LoraConfig
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.run.serving import make_slots
from mcore_rl.weight_sync.controller.factor_sync import choose_factors
from mcore_rl.weight_sync.controller.sync import SyncController
from mcore_rl.weights.hf.config import ModelFacts
from tests.support.engine_keys import KEYS
from tests.support.megatron_ranks import MegatronRanks
from tests.support.megatron_run import make_config, start_engines
from tests.support.sync_stage import generate, logprob_error
from tests.support.tiny_models import write_model
from tests.support.tiny_training import NUM_TOKENS, make_batches

pytestmark = pytest.mark.e2e
EXACT = 1e-5
NAMES = tuple(f"a{rank}" for rank in range(1, 9))
ALONE = "a3"


def make_turns_config(folder: Path) -> Config:
    base = write_model("qwen3", folder / "base")
    config = make_config(base, {"pp": 2}, len(NAMES), routed_experts=False)
    adapters = [AdapterConfig(name, rank=int(name[1:]), alpha=8.0) for name in NAMES]
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    lora = LoraConfig(rank=1, targets=targets, sync="adapter", adapters=adapters)
    optimizer = replace(config.train.optimizer, lr=2e-2)
    return replace(config, train=replace(config.train, lora=lora, optimizer=optimizer))


@pytest.fixture
def ranks() -> Iterator[MegatronRanks]:
    ranks = MegatronRanks(2)
    yield ranks
    ranks.stop()


def train(ranks: MegatronRanks, name: str) -> None:
    """Take a step with advantages of the adapter's own."""
    batches = [
        replace(batch, advantages_T=float(name[1:]) * batch.advantages_T)  # type: ignore[operator]
        for batch in make_batches()
    ]
    ranks.call("choose_adapter", name)
    ranks.train_step([batches], temperature=1.0, num_tokens=NUM_TOKENS)


def logprobs(answer: Any) -> list[Any]:
    return answer["meta_info"]["output_token_logprobs"]


@pytest.mark.slow
def test_one_engine_serves_eight_adapters_each_as_it_is_alone(
    ranks: MegatronRanks, tmp_path: Path
) -> None:
    config = make_turns_config(tmp_path)
    base, policy = config.model.path, ModelFacts.read(config.model.path)
    engines = start_engines(config, tmp_path, [{}])
    try:
        ranks.build(config)
        engines[0].wait_healthy()
        url = engines[0].url
        factors = choose_factors(config.train.lora, config.model, config.rollout, policy, seed=0)
        how = {"timeout_s": 60.0, "verify_every": 1, "keys": KEYS, "loaded": True}
        controller = SyncController(ranks, factors=factors, **how)
        asyncio.run(controller.connect([url]))
        assert not asyncio.run(controller.sync(0)).failed
        before = {name: generate(url, lora_path=name) for name in NAMES[:2]}
        for version, name in enumerate(NAMES, start=1):
            train(ranks, name)
            controller.choose_adapter(name)
            report = asyncio.run(controller.sync(version))
            assert report.verified == {url} and not report.unchanged
        served = {name: generate(url, lora_path=name) for name in NAMES}
        assert all(logprobs(served[name]) != logprobs(before[name]) for name in before)
        ranks.save(tmp_path / "saved", {})
        ranks.finish_save()
        compare(config, tmp_path, served)
        alone = start_alone(config, tmp_path)
        engines.append(alone)
        alone.start()
        alone.wait_healthy()
        assert logprobs(generate(alone.url, lora_path=ALONE)) == logprobs(served[ALONE])
        assert logprob_error(Path(base), generate(url)) < EXACT
    finally:
        for engine in engines:
            engine.stop()


def compare(config: Config, root: Path, served: dict[str, Any]) -> None:
    """Compare what the engine serves with the merged weights of each adapter of the checkpoint."""
    for name, answer in served.items():
        merged = root / f"merged_{name}"
        source = ["--source-hf", config.model.path, "--name", name]
        assert main(["merge-lora", str(root / "saved"), str(merged), *source]) == 0
        assert logprob_error(merged, answer) < EXACT, name


def start_alone(config: Config, root: Path) -> EngineProcess:
    """Return an engine with the same room that serves one adapter alone, from its file."""
    base, out = Path(config.model.path), root / "peft"
    command = ["to-hf", str(root / "saved"), str(out), "--lora", "--name", ALONE]
    assert main([*command, "--source-hf", str(base)]) == 0
    slots = make_slots([f"{ALONE}={out}"], base, pp=1)
    all_slots = make_adapter_slots(config.train.lora, ModelFacts.read(base), has_trainer=True)
    assert slots is not None and all_slots is not None
    own = replace(slots, rank=all_slots.rank, modules=all_slots.modules)
    log = str(root / "alone.log")
    return EngineProcess(EngineSpec(str(base), log, kv_cache_len=4096, keys=KEYS, adapters=own))
