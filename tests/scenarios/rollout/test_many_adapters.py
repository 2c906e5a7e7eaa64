"""Eight adapters of different ranks on one engine: each is what it is alone, and when merged."""

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tools.cli import main
from mcore_rl.agents.gateway.admission import GatewayOptions
from mcore_rl.agents.gateway.gateway import Gateway
from mcore_rl.agents.messages import EndReason
from mcore_rl.agents.recorder import EpisodeLimits, EpisodeRecorder
from mcore_rl.config import ParallelConfig, RolloutConfig
from mcore_rl.planning.adapter_memory import count_buffers
from mcore_rl.planning.deployment import record_layouts
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.collector import GroupRequest
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.transport import HttpOptions
from mcore_rl.run.serving import make_slots
from mcore_rl.types import EpisodeRecord, Prompt
from mcore_rl.weights.hf.config import ModelFacts, parse_hf_config
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from mcore_rl.weights.lora.base import compute_base_sum
from mcore_rl.weights.lora.facts import AdapterFacts
from mcore_rl.weights.lora.peft_files import write_peft
from mcore_rl.weights.models import hf_tensor_shapes
from mcore_rl.workers.episodes import make_turn_sampler
from tests.support.engine_keys import KEYS
from tests.support.gateways import post
from tests.support.stand_in_policy import PlainParser
from tests.support.sync_stage import PROMPT, generate, logprob_error
from tests.support.tiny_models import write_model

pytestmark = pytest.mark.e2e
EXACT = 1e-5
RANKS = range(1, 9)
ALONE = 3
TARGETS = {
    0: ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    1: ("q_proj", "v_proj"),
    2: ("o_proj", "up_proj"),
}
"""By the remainder of an adapter's rank."""


def write_adapter(base: Path, folder: Path, rank: int) -> Path:
    """Random factors; every second adapter has rsLoRA's scale."""
    config = parse_hf_config(base)
    targets, rslora = tuple(sorted(TARGETS[rank % 3])), rank % 2 == 0
    facts = AdapterFacts(rank, 8.0, rslora, targets, False, compute_base_sum(base), str(base))
    generator = torch.Generator().manual_seed(rank)
    factors = {
        key: 0.1 * torch.randn(shape, generator=generator)
        for key, shape in facts.list_factor_shapes(config).items()
    }
    write_peft(folder, facts, config, factors)
    return folder


@dataclass
class Served:
    """A model, its adapters by name, an engine that serves all of them, and one with one alone."""

    base: Path
    folders: dict[str, Path]
    all: EngineProcess
    alone: EngineProcess


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters")
    base = write_model("qwen3", folder / "base")
    folders = {f"a{rank}": write_adapter(base, folder / f"a{rank}", rank) for rank in RANKS}
    given = [f"{name}={path}" for name, path in folders.items()]
    slots = make_slots(given, base, pp=1)
    alone = make_slots([given[ALONE - 1]], base, pp=1)
    assert slots is not None and alone is not None
    engines = [
        EngineProcess(
            EngineSpec(
                str(base), str(folder / f"{i}.log"), kv_cache_len=4096, keys=KEYS, adapters=a
            )
        )
        for i, a in enumerate((slots, replace(alone, rank=slots.rank, modules=slots.modules)))
    ]
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_healthy()
        yield Served(base, folders, *engines)
    finally:
        for engine in engines:
            engine.stop()


def logprobs(answer: Any) -> list[Any]:
    return answer["meta_info"]["output_token_logprobs"]


def test_each_of_eight_adapters_is_what_it_is_alone_and_when_merged(
    served: Served, tmp_path: Path
) -> None:
    url = served.all.url
    one_by_one = {name: generate(url, lora_path=name) for name in served.folders}
    for name, folder in served.folders.items():
        merged = tmp_path / name
        source = ["--source-hf", str(served.base)]
        assert main(["merge-lora", str(folder), str(merged), *source]) == 0
        answer = one_by_one[name]
        assert logprob_error(merged, answer) < EXACT < logprob_error(served.base, answer), name
    name = f"a{ALONE}"
    assert logprobs(generate(served.alone.url, lora_path=name)) == logprobs(one_by_one[name])
    assert logprob_error(served.base, generate(url)) < EXACT

    with ThreadPoolExecutor(len(served.folders)) as pool:
        together = pool.map(lambda name: generate(url, lora_path=name), served.folders)
        for name, answer in zip(served.folders, together, strict=True):
            differences = [
                abs(own[0] - other[0])
                for own, other in zip(logprobs(answer), logprobs(one_by_one[name]), strict=True)
            ]
            assert answer["output_ids"] == one_by_one[name]["output_ids"]
            assert max(differences) < EXACT, name


def test_the_plan_counts_the_buffers_for_adapters(served: Served) -> None:
    log = (served.base.parent / "0.log").read_text()
    [told] = re.findall(r"buffers of adapters: (\d+) bytes", log)
    facts = ModelFacts.read(served.base)
    names = [name for name in hf_tensor_shapes(facts.config) if name.endswith("_proj.weight")]
    layouts = record_layouts(facts, "float32", ParallelConfig(), SGLangSizes())
    numel = count_buffers(layouts.target(), 0, names, max(RANKS), len(RANKS) + 1)
    assert 4 * numel == int(told)


class PlainFormat:
    """Lays every conversation out as PROMPT."""

    def render_whole(self, messages: Any, tools: Any) -> tuple[int, ...]:
        return tuple(PROMPT)

    def render_appended(self, history: Any, answer_ids: Any, new: Any, tools: Any) -> None:
        return None


def test_a_program_chooses_adapters_by_the_gateways_model(served: Served) -> None:
    names = tuple(served.folders)
    rollout = RolloutConfig()
    options = HttpOptions.make(rollout, (), str)
    client = RolloutClient([served.all.address], rollout, options.open)
    prompt = Prompt(0, tuple(PROMPT), (), "unit", None)
    request = GroupRequest(0, 0, prompt, 1, Sampling(8, temperature=0.0))

    async def play() -> EpisodeRecord:
        gateway_options = GatewayOptions(model="a1", adapters=(*names[1:], "base"))
        async with client.open() as session, Gateway(str, gateway_options) as gateway:
            sample_turn = make_turn_sampler(session, request, 0)
            limits = EpisodeLimits(10, 8, 100)
            chat = EpisodeRecorder(PlainFormat(), PlainParser(str), sample_turn, limits)
            url = f"{gateway.open_session(chat).keyless_url}/v1/chat/completions"
            for name in ("x:a3", "base"):
                body = {"model": name, "messages": [{"role": "user", "content": name}]}
                status, answer = await post(url, {**body, "logprobs": True})
                assert status == 200, answer
                told = [each["logprob"] for each in answer["choices"][0]["logprobs"]["content"]]
                wanted = generate(served.all.url, lora_path=name.rpartition(":")[2])
                assert told == pytest.approx([e[0] for e in logprobs(wanted)], abs=EXACT), name
            status, answer = await post(url, {**body, "model": "a9"})
            assert status == 404 and "name one of a1, a2" in answer["error"]["message"]
            return chat.finish(EndReason.DONE)

    episode = asyncio.run(play())
    assert [turn.adapter for turn in episode.turns] == ["a3", "base"] and not episode.rows


def test_an_adapter_that_is_not_served_is_refused(served: Served) -> None:
    refused = generate(served.alone.url, lora_path="a1")
    assert "lora_path='a1': one of a3, base" in str(refused)
