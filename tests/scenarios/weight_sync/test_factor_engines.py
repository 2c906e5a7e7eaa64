"""Factors of Megatron ranks in SGLang's own models: the bits of a sync of merged weights.

Trainer ranks publish checksums of what they would send of their merged weights, FP8 values and
scales included. The test plays the controller.
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import (
    Config,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    TrainConfig,
)
from mcore_rl.planning.deployment import record_layouts
from mcore_rl.weight_sync.controller.factor_sync import FactorOptions
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.wire import AdapterRequest, Link, Report, StageRequest
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from mcore_rl.weights.lora.base import find_base_sum
from mcore_rl.weights.lora.facts import AdapterFacts
from mcore_rl.weights.lora.places import Content
from tests.scenarios.weight_sync.test_fp8_sync import ENGINE, make_dirs
from tests.support.engine_ranks import TIMEOUT_S, EngineRanks
from tests.support.megatron_ranks import MegatronRanks
from tests.support.tiny_training import NUM_TOKENS, make_batches

pytestmark = pytest.mark.gloo
NUM_RANKS = 4
CASES = [
    pytest.param(
        "deepseek_v3", {"tp": 2, "pp": 2, "ep": 2}, True, id="fp8", marks=pytest.mark.slow
    ),
    pytest.param(
        "qwen3_moe", {"tp": 2, "pp": 2, "ep": 2}, False, id="tp_pp_ep", marks=pytest.mark.slow
    ),
    pytest.param(
        "qwen3_moe", {"tp": 2, "etp": 2, "ep": 2}, False, id="etp", marks=pytest.mark.slow
    ),
    pytest.param("qwen3_moe", {"tp": 2, "pp": 2}, True, id="fp8_tp", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", {"ep": 4}, False, id="ep", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[MegatronRanks]:
    ranks = MegatronRanks(NUM_RANKS)
    yield ranks
    ranks.stop()


@dataclass
class Linked:
    """Trainer ranks and an engine, with the stores of their links."""

    ranks: MegatronRanks
    engine: EngineRanks
    config: Config
    num_requests: int = 0

    def __post_init__(self) -> None:
        self.store = LinkStore.serve("127.0.0.1", TIMEOUT_S)
        policy = ModelFacts.read(self.config.model.path)
        sizes = SGLangSizes(tp=ENGINE["tp"], ep=ENGINE["ep"])
        fp8 = self.config.rollout.quantization == "fp8"
        recorded = record_layouts(
            policy, "bfloat16", self.config.parallel, sizes, quantization="fp8" if fp8 else "none"
        )
        self.link = Link(
            *("engine", "127.0.0.1", self.store.port, self.store.key),
            *(NUM_RANKS, ENGINE["tp"], 1 << 16, TIMEOUT_S),
            staged=True,
            layouts=recorded.encode(),
        )
        self.store.keep(self.link)
        lora = self.config.train.lora
        base = find_base_sum("hf", policy, 0)
        facts = AdapterFacts.make(lora, policy.config, base, self.config.model.path)
        self.stamp = facts.make_stamp(policy.config)
        self.engine.ask(link=asdict(self.link))
        check(self.ranks.call("connect", self.link))
        check_answers(self.engine)

    def open_adapter(self, version: int) -> None:
        links, stores = {}, []
        kinds: tuple[Content, Content] = ("base", "factors")
        for kind in kinds:
            stores.append(LinkStore.serve("127.0.0.1", TIMEOUT_S))
            own = {"store_port": stores[-1].port, "store_key": stores[-1].key, "content": kind}
            layouts = FactorOptions(self.stamp).record(self.link.layouts, kind)
            links[kind] = replace(self.link, engine=kind, staged=False, layouts=layouts, **own)
            stores[-1].keep(links[kind])
        self.request(StageRequest(version, adapter=AdapterRequest(self.stamp, *links.values())))
        for link in links.values():
            reports = self.ranks.call("connect", link)
            check(reports)
            assert {report.digest.split()[0] for report in reports} == {"recorded"}
        self.send(version, *kinds)
        self.adapter_stores = stores

    def request(self, request: StageRequest) -> None:
        self.store.put_stage_request(self.num_requests, request)
        self.num_requests += 1

    def send(self, version: int, *names: str) -> int:
        """Return the bytes that the engine's ranks received."""
        sent = self.ranks.call("send", version, list(names), TIMEOUT_S)
        check([report for of_rank in sent for report in of_rank.values()])
        return self.wait()

    def wait(self) -> int:
        reports = []
        until_s = time.monotonic() + TIMEOUT_S
        for rank in range(NUM_RANKS, NUM_RANKS + ENGINE["tp"]):
            while (report := self.store.take_report("receive", rank)) is None:
                assert time.monotonic() < until_s, f"rank {rank} did not report"
                time.sleep(0.01)
            reports.append(report)
        check(reports)
        return sum(report.num_bytes for report in reports)

    def swap(self, version: int) -> None:
        """Swap a version in and compare the live parameters with the trainer's checksums."""
        self.engine.ask(link=asdict(self.link), version=version)
        check_answers(self.engine)


def check(reports: list[Report]) -> None:
    assert not [report.error for report in reports if report.error is not None]


def check_answers(engine: EngineRanks) -> None:
    assert not [answer["error"] for answer in engine.answers() if answer["error"] is not None]


def make_config(hf_dir: Path, layout: Mapping[str, Any], *, fp8: bool) -> Config:
    return Config(
        model=ModelConfig(path=str(hf_dir), dtype="bfloat16"),
        parallel=ParallelConfig(**layout),
        train=TrainConfig(
            optimizer=OptimizerConfig(lr=1e-2), lora=LoraConfig(rank=4), recompute="none"
        ),
        rollout=RolloutConfig(quantization="fp8" if fp8 else "none"),
    )


@pytest.mark.parametrize(("kind", "layout", "fp8"), CASES)
def test_engines_merge_to_the_bits_of_the_trainers(
    ranks: MegatronRanks, tmp_path: Path, kind: str, layout: Mapping[str, Any], fp8: bool
) -> None:
    hf_dir, engine_dir = make_dirs(kind, tmp_path)
    if not fp8:
        config = json.loads((hf_dir / "config.json").read_text())
        (engine_dir / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    engine = EngineRanks(engine_dir, ENGINE)
    try:
        config = make_config(hf_dir, layout, fp8=fp8)
        ranks.build(config)
        linked = Linked(ranks, engine, config)
        linked.request(StageRequest(1))
        whole = linked.send(1, "engine")
        linked.swap(1)
        linked.open_adapter(1)
        for version in (2, 3):
            num_dp = NUM_RANKS // (layout.get("tp", 1) * layout.get("pp", 1))
            num_tokens = num_dp * NUM_TOKENS
            ranks.train_step([make_batches()] * num_dp, temperature=1.0, num_tokens=num_tokens)
            request = AdapterRequest(linked.stamp, verify=True)
            linked.request(StageRequest(version, adapter=request))
            ranks.call("send", version, ["factors"], TIMEOUT_S)
            ranks.call("publish_sums", version, ["engine"])
            assert linked.wait() < whole / 3
            linked.swap(version)
    finally:
        engine.stop()
