"""Real Megatron ranks and SGLang servers under Ray: calls, weights, served models, deaths.

This covers cluster.model_groups, engines, workers.engine_worker and served_engines, and the classes
that rollout.reward_heads gives to SGLang.
"""

import asyncio
import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from mcore_rl.algo.policy_loss import sft_loss
from mcore_rl.cluster.engines import EngineGroup
from mcore_rl.cluster.group import RankError, guard
from mcore_rl.cluster.model_groups import TrainerGroup
from mcore_rl.cluster.placement import reserve
from mcore_rl.cluster.served_engines import ServedEngines
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.cluster.watchdog import TAG, list_session_pids
from mcore_rl.config import (
    ClusterConfig,
    JudgeConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    ServedModelConfig,
    TrainConfig,
)
from mcore_rl.planning.bundles import plan_engine, plan_ranks, plan_served
from mcore_rl.planning.slots import Slot
from mcore_rl.process.http import open_session
from mcore_rl.rewards.model_scorers import JudgeScorer, RewardModelScorer
from mcore_rl.rewards.scorer import Scorer
from mcore_rl.rollout.engine_spec import EngineAddress, EngineSpec
from mcore_rl.rollout.kv_admission import count_requests
from mcore_rl.rollout.served_models import ServedClient, find_endpoint
from mcore_rl.tasks.arithmetic import prepare_arithmetic
from mcore_rl.types import LogprobOptions, Prompt, Sample, TrainBatch, VersionSpan, WeightVersion
from mcore_rl.weight_sync.controller.sync import SyncController
from mcore_rl.workers.model_worker import ModelSpec
from tests.support.engine_keys import KEYS
from tests.support.tiny_models import write_reward_model

pytestmark = pytest.mark.e2e

LENS = (7, 12)


@dataclass
class Run:
    trainer: TrainerGroup
    engines: EngineGroup
    address: EngineAddress
    log_dir: Path
    served: ServedEngines


BESIDE = ServedModelConfig(dtype="float32", kv_cache_len=4096, request_timeout_s=60, restarts=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Two expert-parallel ranks, an engine, a judge and a reward model.

    Engine and judge serve the random weights that the ranks exported.
    """
    folder = tmp_path_factory.mktemp("run")
    prepare_arithmetic(folder / "data")
    with open_ray_session(ClusterConfig(object_store_mib=80), num_cpus=3):
        write_reward_model("qwen3", folder / "reward_model")
        paths = {"judge": folder / "hf", "reward_model": folder / "reward_model"}
        beside = {role: replace(BESIDE, path=str(path)) for role, path in paths.items()}
        plans = [
            plan_ranks(2, 0.4, 0),
            plan_engine(1, 0.4, 0),
            *chain(*plan_served(beside, 0.4, 0).values()),
        ]
        trainer_slots, engine_slots, *others = reserve(plans, timeout_s=20)
        trainer = TrainerGroup(trainer_slots, folder / "logs", call_timeout_s=120)
        engines = EngineGroup([engine_slots], folder / "logs", call_timeout_s=120, moves=True)
        trainer.start_build(trainer_spec(folder / "data" / "model"), timeout_s=240)
        trainer.wait_built()
        trainer.export_hf(str(folder / "hf"))
        spec = EngineSpec(
            model_path=str(folder / "hf"),
            log_path=str(folder / "logs" / "sglang_0.log"),
            kv_cache_len=4096,
            custom_weight_loaders=("mcore_rl.weight_sync.receiver.load",),
            keys=KEYS,
        )
        engines.start_build([spec], timeout_s=240, max_restarts=1)
        slots = {role: [of_role] for role, of_role in zip(beside, others, strict=True)}
        served = ServedEngines(beside, slots, folder / "logs", 120, {}, KEYS)
        [address] = engines.wait_built()
        yield Run(trainer, engines, address, folder / "logs", served)


def trainer_spec(model: Path) -> ModelSpec:
    return ModelSpec(
        model=ModelConfig(path=str(model), init="random"),
        parallel=ParallelConfig(ep=2),
        train=TrainConfig(),
        optimizer=OptimizerConfig(lr=1e-2),
        total_steps=10,
        seed=0,
        loss=sft_loss,
        collective_timeout_s=120,
    )


def make_batch(seed: int) -> TrainBatch:
    num_tokens = sum(LENS)
    starts = torch.tensor([0, *LENS[:-1]])
    return TrainBatch(
        token_ids_T=torch.randint(
            5, 40, (num_tokens,), generator=torch.Generator().manual_seed(seed)
        ),
        loss_mask_T=torch.ones(num_tokens, dtype=torch.bool).index_fill(0, starts, False),
        lens_N=LENS,
        loss_weights_T=torch.full((num_tokens,), 1.0 / (2 * num_tokens)),
    )


def test_ranks_train_and_come_back_to_a_checkpoint(run: Run, tmp_path: Path) -> None:
    batches = [[make_batch(0)], [make_batch(1)]]

    def logprobs(*, reference: bool = False) -> torch.Tensor:
        answers = run.trainer.compute_logprobs(batches, LogprobOptions(reference, 1.0))
        assert [len(of_dp) for of_dp in answers] == [1, 1]
        return torch.cat([of_dp[0].logprobs_T for of_dp in answers])

    before = logprobs()
    assert before.shape == (2 * sum(LENS),) and before.std() > 0
    run.trainer.snapshot_reference()
    run.trainer.save(str(tmp_path / "checkpoint"), {"step": 0, "words": ["a"]})
    run.trainer.finish_save()
    stats = [
        run.trainer.train_step(batches, temperature=1.0, num_tokens=2 * sum(LENS)) for _ in range(3)
    ]
    assert stats[2].loss < stats[1].loss < stats[0].loss
    reported = [step.ranks.seconds for step in stats if step.ranks is not None]
    assert [set(seconds) for seconds in reported] == [{"forward", "train"}, {"train"}, {"train"}]
    assert all(len(s) == 2 and min(s) > 0 for seconds in reported for s in seconds.values())
    assert not torch.equal(logprobs(), before)
    torch.testing.assert_close(logprobs(reference=True), before, atol=0, rtol=0)
    assert run.trainer.load(str(tmp_path / "checkpoint")) == {"step": 0, "words": ["a"]}
    torch.testing.assert_close(logprobs(), before, atol=0, rtol=0)
    assert "process" in (run.log_dir / "trainer_rank1.log").read_text()


def test_weights_reach_the_engine_through_the_ranks(run: Run) -> None:
    async def sync() -> None:
        sync_controller = SyncController(run.trainer, timeout_s=60, keys=KEYS)
        await sync_controller.connect([run.address.url])
        report = await sync_controller.sync(3)
        assert report.failed == {}

    asyncio.run(run.engines.look())
    assert run.engines.health.serving == [run.address.url]
    asyncio.run(guard(sync(), run.trainer.watch(), run.engines.watch()))


def test_samples_are_scored_by_judge_and_reward_model(run: Run, tmp_path: Path) -> None:
    """Any word of the judge is a verdict, as they are random; transformers checks the scores."""
    models = run.served.wait_built()
    folder = models["reward_model"].model
    question = RewardModelScorer(folder)
    template = tmp_path / "template.jinja"
    template.write_text("{{ response }}")
    asked = JudgeConfig(template=str(template), verdict=r"^()", words={"": 0.5}, max_tokens=4)
    config = RewardConfig(parts=["judge", "reward_model"], weights=[2.0, 1.0], judge=asked)
    texts = ("12 + 5 = 17", "17", "17 " * 600)
    samples = [make_sample(text) for text in texts]
    with Scorer(config, 100, {"judge": JudgeScorer(asked), "reward_model": question}) as scorer:
        posts = {role: ServedClient(model).post_all for role, model in models.items()}
        scorer.connect(posts, lambda work: asyncio.run(guard(work, *run.served.watches())))
        scores = scorer(samples)
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    expected = [model(torch.tensor([question.tokens(s)])).logits.item() for s in samples[:2]]
    assert scores.parts["reward_model"][:2] == pytest.approx(expected, abs=1e-4)
    assert abs(expected[0] - expected[1]) > 1e-2
    assert scores.rewards_N[:2] == pytest.approx([1.0 + score for score in expected], abs=1e-4)
    assert scores.has_outcome_N == [True, True, False]
    assert re.search(
        r"ServedRequestError: (judge|reward_model), engine http://.* HTTP 400", scores.errors[2]
    )


def make_sample(text: str) -> Sample:
    prompt = Prompt(0, (1,), ({"role": "user", "content": "Ada has 12 apples"},), "unit", "17")
    return Sample(prompt, 0, (5,), (-0.1,), "stop", (VersionSpan(0, 1, WeightVersion(0)),), text)


@pytest.mark.slow
def test_a_judge_that_dies_serves_again_at_its_address(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = run.served.wait_built()["judge"]
    [engine] = judge.engines
    assert Path(engine.log_path) == run.log_dir / "judge_0.log" and Path(engine.log_path).exists()
    assert (run.log_dir / "judge_rank0.log").exists()
    monkeypatch.setenv("JUDGE_KEY", KEYS.user)
    url = f"{engine.url}/v1"
    by_url = ServedModelConfig(url=url, api_key_env="JUDGE_KEY", request_timeout_s=10)
    assert find_endpoint("judge", by_url).model == judge.model
    with pytest.raises(
        ValueError, match=r"judge.url=.*: it has no model 'other', but .*; set judge.url_model"
    ):
        find_endpoint("judge", replace(by_url, url_model="other"))
    before = ask(engine.url)

    async def serves(wanted: bool) -> None:
        while (judge.health.serving == [engine.url]) is not wanted:
            await asyncio.sleep(0.1)

    [server] = run.served.server_pids("judge")
    os.kill(server, signal.SIGKILL)
    for wanted in (False, True):
        asyncio.run(guard(asyncio.wait_for(serves(wanted), 60), *run.served.watches()))
    assert ask(engine.url) == before
    [server] = run.served.server_pids("judge")
    os.kill(server, signal.SIGKILL)
    with pytest.raises(RankError, match=r"(?s)rank 0 \(judge.*died \(status -9\); its last lines:"):
        asyncio.run(guard(asyncio.sleep(60), *run.served.watches()))
    with pytest.raises(
        ValueError, match=r"judge.url=.*: GET .*/v1/models does not list models: URLError"
    ):
        find_endpoint("judge", by_url)


def ask(url: str) -> str:
    """The judge's greedy answer in a chat."""
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": "Ada has 12 apples"}],
        "max_tokens": 4,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **KEYS.user_headers},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def find_worker(name: str) -> psutil.Process:
    """Return the process of this session that Ray titled so."""
    found = []
    for pid in list_session_pids(os.environ[TAG], os.getpid()):
        with suppress(psutil.NoSuchProcess):  # one that has ended
            process = psutil.Process(pid)
            if process.cmdline()[:1] == [f"ray::{name}"]:
                found.append(process)
    [worker] = found
    return worker


def test_an_engine_whose_worker_is_lost_is_started_where_there_is_room(run: Run) -> None:
    health = run.engines.health
    run.engines.find_home = lambda engine: 7 + engine
    before = run.engines.server_pids()
    find_worker("engine_rank0").kill()

    async def move() -> None:
        while not health.rotation.joined:
            await asyncio.sleep(0.1)
        await run.engines.look()

    asyncio.run(guard(asyncio.wait_for(move(), 200), run.engines.watch()))
    [(url, joined)] = health.rotation.joined.items()
    assert url != run.address.url and (joined.home, joined.address.number) == (7, 0)
    assert [(state.url, state.healthy) for state in health.states] == [(url, True)]
    assert health.take_left() == [run.address.url] and health.num_coming == 0
    assert health.serving == [], "it has the weights of its folder"
    assert run.engines.server_pids() != before


def test_engines_are_added_and_taken_out(run: Run) -> None:
    engines, health = run.engines, run.engines.health
    reserved = []

    def reserve_one() -> list[Slot]:
        [slots] = reserve([plan_engine(1, 0.4, 0)], timeout_s=20)
        reserved.append(slots)
        return slots

    async def count(engine: EngineAddress) -> int | None:
        async with open_session(20.0) as http:
            return await count_requests(http, engine)

    async def change() -> list[int]:
        first = health.states[0].url
        health.set_serving([first], {})
        with pytest.raises(ValueError, match=r"without engine 0, 0 engines would serve, fewer"):
            await engines.drain(0, count, 60.0)
        with pytest.raises(ValueError, match=r"there is no engine 7: the run has \[0\]"):
            await engines.drain(7, count, 60.0)
        added = await engines.add(reserve_one)
        assert added.number == 1 and health.serving == [first]
        assert [row[0] for row in engines.describe()] == [0, 1]
        assert "no weights" in engines.describe()[1][3]
        health.set_serving([first, added.url], {})
        assert await count(added) == 0
        await engines.drain(1, count, 60.0)
        assert health.serving == [first] and [row[0] for row in engines.describe()] == [0]
        again = await engines.add(reserve_one)
        await engines.look()
        assert health.why_out(added.url) == "it has left"
        await engines.drain(again.number, count, 60.0)
        return [again.number, len(reserved)]

    assert asyncio.run(change()) == [2, 1], "it takes the place of the one before"


def test_a_worker_lost_once_too_often_and_a_killed_rank_are_told_at_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore_rl.cluster.answers.GRACE_S", 50.0)

    async def wait() -> None:
        await asyncio.sleep(60)

    find_worker("engine_rank0").kill()
    began = time.monotonic()
    with pytest.raises(RankError, match=r"engine rank 0 died \(killed, "):
        asyncio.run(guard(wait(), run.trainer.watch(), run.engines.watch()))
    assert time.monotonic() - began < 30

    victim = run.trainer.pids()[1]
    os.kill(victim, signal.SIGSTOP)  # so that the other rank waits for it in a collective
    threading.Timer(2.0, os.kill, (victim, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(RankError, match=r"trainer rank 1 \(dp 1 tp 0 pp 0 cp 0 ep 1\) died"):
        batches = [[make_batch(0)], [make_batch(1)]]
        run.trainer.train_step(batches, temperature=1.0, num_tokens=2 * sum(LENS))
    assert 2 <= time.monotonic() - began < 40
