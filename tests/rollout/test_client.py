"""RolloutClient against real engines: log-probs, order, seeds, lost engines, ranks, dtypes."""

import asyncio
import json
import os
import signal
import threading
import time
import urllib.request
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from mcore_rl.config import RolloutConfig, ServedModelConfig
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.process.network import find_free_port
from mcore_rl.rollout.client import RolloutClient, RolloutSession
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.engine_spec import EngineAddress, EngineSpec
from mcore_rl.rollout.heartbeat import Heartbeat
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.scoring import Teacher
from mcore_rl.rollout.served_models import ServedEndpoint
from mcore_rl.rollout.streamed_answer import StreamedAnswer
from mcore_rl.rollout.transport import HttpOptions, RolloutError
from mcore_rl.types import Prompt, Sample, VersionSpan, WeightVersion
from tests.support.engine_keys import KEYS
from tests.support.engines import EOS_ID, VOCAB_SIZE, measure_idle_cpu, save_tiny_moe
from tests.support.sampled import logprob_error, make_prompts

pytestmark = pytest.mark.e2e

CONFIG = RolloutConfig(deterministic=True, request_timeout_s=60.0, retries=2)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(model_path):
    return Qwen3MoeForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(model_path, tmp_path_factory):
    log = str(tmp_path_factory.mktemp("logs") / "engine.log")
    with EngineProcess(
        EngineSpec(model_path, log, deterministic=True, weight_version=7, keys=KEYS)
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def others(model_path, tmp_path_factory):
    """Engines of single tests; they start side by side."""
    folder = tmp_path_factory.mktemp("others")
    logs = {name: str(folder / f"{name}.log") for name in ("second", "two_ranks", "bfloat16")}
    rounded = save_tiny_moe(folder / "bfloat16", torch.bfloat16)
    engines = {
        "second": EngineProcess(EngineSpec(model_path, logs["second"], keys=KEYS)),
        "two_ranks": EngineProcess(
            EngineSpec(model_path, logs["two_ranks"], tp=2, ep=2, deterministic=True, keys=KEYS)
        ),
        "bfloat16": EngineProcess(
            EngineSpec(rounded, logs["bfloat16"], dtype="bfloat16", keys=KEYS)
        ),
    }
    for engine in engines.values():
        engine.start()
    yield engines
    for engine in engines.values():
        engine.stop()


def healthy(engine: EngineProcess) -> EngineProcess:
    engine.wait_healthy()
    return engine


def address(engine: EngineProcess) -> EngineAddress:
    return engine.address


def client_of(*engines: EngineProcess, **changes: Any) -> RolloutClient:
    config = replace(CONFIG, **changes)
    transport = HttpOptions.make(config, [EOS_ID], lambda ids: " ".join(map(str, ids))).open
    return RolloutClient([address(e) for e in engines], config, transport)


def generate(
    client: RolloutClient, prompts: list[Prompt], num_samples: int, sampling: Sampling
) -> list[Sample]:
    return asyncio.run(client.generate(prompts, num_samples, sampling))


def post(url: str, **body: object) -> None:
    headers = {"Content-Type": "application/json", **KEYS.admin_headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30):
        pass


def relabel(engine: EngineProcess, version: str) -> None:
    post(f"{engine.url}/update_weight_version", new_version=version, abort_all_requests=False)


def test_logprobs_equal_transformers(engine, model):
    prompts = make_prompts(24)
    for temperature in (1.0, 0.7):
        sampling = Sampling(max_response_len=24, temperature=temperature, seed=0)
        samples = generate(client_of(engine), prompts, 2, sampling)
        assert logprob_error(model, samples, temperature) < 1e-4


def test_an_engine_tells_how_much_of_its_kv_cache_is_free(engine):
    """All of it when idle, less by at least their tokens while requests run."""
    client = client_of(engine)
    sampling = Sampling(max_response_len=400, seed=0)

    async def ask() -> list[float | None]:
        async with asyncio.timeout(60), client.open() as session:
            told = [await session.transport.free_kv(address(engine))]
            work = asyncio.create_task(session.generate(make_prompts(24), 2, sampling))
            while not work.done():
                told.append(await session.transport.free_kv(address(engine)))
                await asyncio.sleep(0.01)
            await work
            return told

    first, *others = asyncio.run(ask())
    assert first == 1.0
    assert min(share for share in others if share is not None) < 0.99


def test_a_teacher_scores_the_tokens_of_others_also_where_one_of_its_engines_is_lost(engine, model):
    """Its log-probs of responses that it did not sample are those of transformers."""
    samples = generate(
        client_of(engine), make_prompts(12), 1, Sampling(max_response_len=20, seed=3)
    )
    others = [
        replace(s, response_ids=ids, logprobs=(0.0,) * len(ids), versions=spans)
        for s in samples
        for ids in [tuple((t + 5) % VOCAB_SIZE for t in s.response_ids)]
        for spans in [(VersionSpan(0, len(ids), WeightVersion(0)),)]
    ]
    lost = EngineAddress(f"http://127.0.0.1:{find_free_port('127.0.0.1')}", "lost.log")
    engines, config = (lost, address(engine)), ServedModelConfig(request_timeout_s=60.0)
    health = EngineHealth([each.url for each in engines])
    endpoint = ServedEndpoint("teacher", config, engines, health, "unused", KEYS.user)
    teacher = Teacher(endpoint, EventLoop().run)
    for _ in range(2):  # the second time with prompts in the engine's cache
        scored = [replace(s, logprobs=row) for s, row in zip(others, teacher(others), strict=True)]
        assert logprob_error(model, scored) < 1e-4


def test_samples_come_grouped_in_order_and_complete(engine):
    prompts = make_prompts(9)
    samples = generate(client_of(engine), prompts, 3, Sampling(max_response_len=32, seed=0))
    assert [(s.prompt, s.sample_index) for s in samples] == [
        (p, i) for p in prompts for i in range(3)
    ]
    assert len({s.response_ids for s in samples}) > len(prompts)
    for sample in samples:
        stopped = sample.response_ids[-1] == EOS_ID
        assert EOS_ID not in sample.response_ids[:-1]
        assert sample.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(sample.response_ids) == 32
        assert sample.versions == (VersionSpan(0, len(sample.response_ids), WeightVersion(7)),)
        assert sample.text == " ".join(map(str, sample.response_ids))
    assert {s.finish_reason for s in samples} == {"stop", "length"}


def test_greedy_is_the_argmax(engine, model):
    samples = generate(
        client_of(engine), make_prompts(6), 1, Sampling(max_response_len=12, temperature=0.0)
    )
    assert logprob_error(model, samples) < 1e-4
    for sample in samples:
        ids = torch.tensor([*sample.prompt.token_ids, *sample.response_ids])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(sample.prompt.token_ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(sample.response_ids)


def test_seeds_repeat_whatever_else_runs(engine):
    prompts, sampling = make_prompts(12), Sampling(max_response_len=20, seed=3)
    together = generate(client_of(engine), prompts, 2, sampling)
    alone = [s for p in prompts[::-1] for s in generate(client_of(engine), [p], 2, sampling)]
    other = generate(client_of(engine), prompts, 2, replace(sampling, seed=4))
    alone.sort(key=lambda s: s.prompt.index)
    assert [s.response_ids for s in together] == [s.response_ids for s in alone]
    assert [s.response_ids for s in together] != [s.response_ids for s in other]


def test_a_refused_request_names_the_engine(engine):
    too_long = [replace(make_prompts(1)[0], token_ids=(5,) * 2000)]
    with pytest.raises(
        RolloutError, match=rf"{engine.url} \(log .*\) refused a request with HTTP 400"
    ):
        generate(client_of(engine), too_long, 1, Sampling(max_response_len=4))


def test_responses_go_on_with_other_weights_or_begin_again(engine, model):
    """Responses that go on name the version of each token; aborted ones are of the new one alone.

    As both versions are the same weights, all log-probs must be right.
    """
    prompts, client, changed = make_prompts(8), client_of(engine), Sampling(max_response_len=200)

    async def sample(swap) -> list[Sample]:
        async with client.open() as session:
            work = asyncio.ensure_future(session.generate(prompts, 2, changed))
            while session.num_open in (0, 16):
                await asyncio.sleep(0.01)
            await swap(session)
            samples = await work
            assert session.num_open == 0
            return samples

    async def resume(session: RolloutSession) -> None:
        await asyncio.to_thread(post, f"{engine.url}/pause_generation", mode="retract")
        await asyncio.to_thread(relabel, engine, "8")
        await asyncio.to_thread(post, f"{engine.url}/continue_generation")

    async def begin_again(session: RolloutSession) -> None:
        await session.hold(cut_off=True)
        assert session.num_cut_off > 0
        await asyncio.to_thread(relabel, engine, "7")
        await session.resume()

    samples = asyncio.run(sample(resume))
    assert logprob_error(model, samples) < 1e-4
    spans = [[span.version for span in s.versions] for s in samples]
    assert [7, 8] in spans and all(versions in ([7], [7, 8]) for versions in spans), spans

    samples = asyncio.run(sample(begin_again))
    assert logprob_error(model, samples) < 1e-4
    spans = [[span.version for span in s.versions] for s in samples]
    assert [7] in spans and all(versions in ([8], [7]) for versions in spans), spans


def test_responses_that_an_engine_has_put_back_into_its_queue_begin_again(
    engine, model, monkeypatch
):
    """The client has some parts of each response; the last part repeats what those had."""
    add, ends = StreamedAnswer.add, []

    def note_end(self, part):
        ends.append((part["meta_info"]["finish_reason"] or {}).get("type"))
        add(self, part)

    monkeypatch.setattr(StreamedAnswer, "add", note_end)

    async def sample() -> list[Sample]:
        async with client_of(engine, stream_every=4).open() as session:
            work = asyncio.ensure_future(session.generate(make_prompts(4), 2, Sampling(200)))
            while len(ends) < 8:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(post, f"{engine.url}/pause_generation", mode="retract")
            await session.hold(cut_off=True)
            assert session.num_cut_off > 0 and "abort" in ends
            await asyncio.to_thread(post, f"{engine.url}/continue_generation")
            await session.resume()
            return await work

    assert logprob_error(model, asyncio.run(sample())) < 1e-4


def test_an_idle_engine_leaves_the_cpu_alone(engine):
    generate(client_of(engine), make_prompts(4), 1, Sampling(max_response_len=4))
    assert measure_idle_cpu(engine.pid, 2.5, enough_s=0.25) < 0.25


def test_a_paused_engine_leaves_the_cpu_alone(engine):
    post(f"{engine.url}/pause_generation", mode="in_place")
    try:
        assert measure_idle_cpu(engine.pid, 2.5, enough_s=0.25) < 0.25
    finally:
        post(f"{engine.url}/continue_generation")


def wait_for_an_answer(heartbeat: Heartbeat, timeout_s: float = 30.0) -> bool:
    """Ask; return whether all questions so far have an answer in time."""
    deadline = time.monotonic() + timeout_s
    heartbeat.find_silence_s()
    time.sleep(0.05)
    while heartbeat._silent_since_s is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_lost_engines(engine, others):
    """The death of one of two engines costs no sample; the last one's is an error naming it."""
    prompts, sampling = make_prompts(24), Sampling(max_response_len=120, seed=0)
    second = healthy(others["second"])
    killer = threading.Timer(0.5, os.kill, (second.pid, signal.SIGKILL))
    killer.start()
    samples = generate(client_of(engine, second), prompts, 4, sampling)
    assert [s.prompt.index for s in samples] == [p.index for p in prompts for _ in range(4)]
    assert not second.is_alive()

    start = time.monotonic()
    with pytest.raises(RolloutError, match=rf"{second.url} \(log .*second.log\).* failed 3 times"):
        generate(client_of(second), prompts[:2], 1, sampling)
    assert time.monotonic() - start < 30.0  # not rollout.request_timeout_s, 60 s


@pytest.mark.slow
def test_two_ranks(model, others):
    engine = healthy(others["two_ranks"])
    samples = generate(client_of(engine), make_prompts(8), 2, Sampling(max_response_len=12, seed=0))
    assert logprob_error(model, samples) < 1e-4
    assert measure_idle_cpu(engine.pid, 5.0, enough_s=1.0) < 1.0


def test_an_engine_with_a_rank_that_hangs_is_silent_until_it_goes_on(others):
    engine = healthy(others["two_ranks"])
    heartbeat = Heartbeat(engine.url, KEYS, 60.0, interval_s=0.0)
    assert wait_for_an_answer(heartbeat)
    [rank] = [
        process
        for process in psutil.Process(engine.pid).children(recursive=True)
        if "scheduler_TP1" in " ".join(process.cmdline())
    ]
    rank.suspend()
    try:
        assert not wait_for_an_answer(heartbeat, 2.0)
        assert heartbeat.find_silence_s() >= 2.0
        heartbeat.excuse()
        assert heartbeat.find_silence_s() < 2.0
    finally:
        rank.resume()
    assert wait_for_an_answer(heartbeat)


def test_bfloat16(others):
    engine = healthy(others["bfloat16"])
    model = Qwen3MoeForCausalLM.from_pretrained(engine.spec.model_path, dtype=torch.float32).eval()
    samples = generate(client_of(engine), make_prompts(8), 1, Sampling(max_response_len=12))
    assert 1e-4 < logprob_error(model, samples) < 0.5


def test_tokens_of_older_weights_than_an_engine_was_brought_are_refused(engine):
    """It has started again with its model's folder, and answers before its watch has seen that."""
    health = EngineHealth([engine.url])
    transport = HttpOptions.make(CONFIG, [EOS_ID], lambda ids: "").open
    client = RolloutClient([engine.address], replace(CONFIG, retries=1), transport, health)
    health.set_serving([engine.url], {}, WeightVersion(8))
    with pytest.raises(RolloutError, match=r"failed 2 times.*weights 7 after a sync of 8.*again"):
        generate(client, make_prompts(1), 1, Sampling(max_response_len=4))
    health.set_serving([engine.url], {}, WeightVersion(7))
    [sample] = generate(client, make_prompts(1), 1, Sampling(max_response_len=4))
    assert sample.versions[0].version == 7
