"""A collector refuses programs, or lets them wait, by what a real engine says of its KV cache."""

import time
from collections.abc import Iterator
from pathlib import Path
from sys import executable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mcore_rl.cluster.stores import StoreHandles, share_array
from mcore_rl.config import AgentsConfig, RolloutConfig
from mcore_rl.data.decoding import make_decode
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.rollout.collector import CollectorCommands, GroupRequest
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.request import Sampling
from mcore_rl.tasks.calculator import CHAT_TEMPLATE, vocabulary
from mcore_rl.tasks.tiny_models import write_tiny_model
from mcore_rl.types import Prompt, Sample
from mcore_rl.workers.collector_worker import CollectorSpec, CollectorWorker
from mcore_rl.workers.episodes import EpisodeSpec
from tests.support.engine_keys import KEYS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KV_CACHE_LEN = 2048
LONG = 1900
DEADLINE_S = 300.0
PROMPT = Prompt(0, (3, 4), ({"role": "user", "content": "what is 1 + 2 ?"},), "unit", "3")
PROGRAM = f"""
import json, sys, time, urllib.error, urllib.request
from os import environ
from pathlib import Path

def ask(number, max_tokens):
    messages = [{{"role": "user", "content": "what is 1 + 2 ?"}}]
    body = {{"model": "m", "messages": messages, "max_tokens": max_tokens, "seed": number}}
    headers = {{"Authorization": "Bearer " + environ["OPENAI_API_KEY"]}}
    url = environ["OPENAI_BASE_URL"] + "/chat/completions"
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        json.load(urllib.request.urlopen(request))
        return True
    except urllib.error.HTTPError as error:
        assert error.code == 429 and error.headers["Retry-After"] == "1", error
        return False

began, ended = Path(sys.argv[1], "began"), Path(sys.argv[1], "ended")
longest_s = 0.0
if json.loads(Path("task.json").read_text())["sample_index"] == 0:
    began.touch()
    assert ask(0, {LONG})
    ended.touch()
else:
    while not began.exists():
        time.sleep(0.01)
    number, is_answered = 0, False
    while not (ended.exists() and is_answered):
        number, asked_s = number + 1, time.monotonic()
        is_answered = ask(number, 1)
        longest_s = max(longest_s, time.monotonic() - asked_s)
        time.sleep(0.05)
print(json.dumps({{"reward": longest_s}}))
"""
"""The first fills the KV cache; the other asks again and again, until that one has its answer. Its
reward is the longest time that an answer took, in seconds."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that ends no answer."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"max_position_embeddings": 2 * KV_CACHE_LEN, "eos_token_id": None}
    write_tiny_model(folder, vocabulary(), CHAT_TEMPLATE, ("<|tool|>",), **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    log_path = str(tmp_path_factory.mktemp("engine") / "engine.log")
    spec = EngineSpec(str(model_dir), log_path, kv_cache_len=KV_CACHE_LEN, keys=KEYS)
    with EngineProcess(spec) as engine:
        yield engine


def play(engine: EngineProcess, model_dir: Path, folder: Path, **bounds: Any) -> list[Sample]:
    """Return the episodes of both programs, played by a collector with these bounds."""
    options = {"command": [executable, "-c", PROGRAM, str(folder)]}
    parsers = {"tool_parser": "none", "reasoning_parser": "none"}
    agents = AgentsConfig("command", options, max_turns=10000, **parsers, **bounds)
    episodes = EpisodeSpec(
        agents, str(model_dir), False, "Qwen3MoeForCausalLM", (1,), LONG + 50, LONG, folder / "logs"
    )
    decode = make_decode(load_tokenizer(model_dir, "model.path"))
    spec = CollectorSpec(RolloutConfig(), (), decode, None, None, episodes)
    worker = CollectorWorker(spec, 0, 0, share_array)
    worker.connect([engine.address], [engine.url], {}, StoreHandles((), DEADLINE_S))
    try:
        request = GroupRequest(0, 0, PROMPT, 2, Sampling(LONG))
        worker.submit(CollectorCommands(sessions={0: 8}, begin=[request]))
        until_s = time.monotonic() + DEADLINE_S
        while not (events := worker.poll_events(1.0, 0.0)).finished:
            assert not events.failed and time.monotonic() < until_s, events
        return worker.samples([0, 0], [0, 1])
    finally:
        worker.close()


def refused(sample: Sample) -> float:
    assert sample.episode is not None and sample.finish_reason == "done", sample.episode
    return sample.episode.metrics["refused"]


@pytest.mark.parametrize("min_free_kv", [0.0, 0.8])
def test_requests_are_refused_while_no_engine_has_the_room(
    engine: EngineProcess, model_dir: Path, tmp_path: Path, min_free_kv: float
) -> None:
    bounds = {"min_free_kv": min_free_kv, "max_wait_s": 0.0}
    first, second = play(engine, model_dir, tmp_path, **bounds)
    print(f"{min_free_kv=}: {refused(second)} requests refused")
    assert refused(first) == 0 and (refused(second) > 0) == (min_free_kv > 0)


def test_requests_that_wait_for_room_are_answered(
    engine: EngineProcess, model_dir: Path, tmp_path: Path
) -> None:
    bounds = {"min_free_kv": 0.8, "max_wait_s": DEADLINE_S}
    first, second = play(engine, model_dir, tmp_path, **bounds)
    assert refused(first) == refused(second) == 0
    assert second.episode is not None and first.episode is not None
    print(f"waited {second.episode.reward} s of {first.episode.metrics['answer_s']}")
    assert second.episode.reward > 0.2 * first.episode.metrics["answer_s"]
