"""The parity check: its probe, and real engines whose weights are right, wrong or become wrong
after a sync.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from mcore_rl.batches.assembly import assemble
from mcore_rl.batches.batch import select
from mcore_rl.batches.stored_batch import make_stored_batch
from mcore_rl.config import ParityCheckConfig
from mcore_rl.data.images.batch import join_patches
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.process.server_keys import ServerKeys
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_health import EngineHealth, EngineState
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.run.roles.colocation import EngineMemory, SharedGpus
from mcore_rl.run.roles.parity_check import (
    MAX_PROMPT_TOKENS,
    MOST_SEQUENCES,
    ParityCheck,
    ScoredProbe,
    make_probe,
)
from mcore_rl.run.roles.parity_tolerance import MIN_TOKENS, EngineDifference, ParityTolerance
from mcore_rl.run.roles.weight_sync import EngineSync
from mcore_rl.types import (
    LogprobOptions,
    Prompt,
    StoredBatch,
    TokenScores,
    TrainBatch,
    WeightVersion,
)
from mcore_rl.weight_sync.controller.sync import SyncController, SyncError
from mcore_rl.weight_sync.controller.sync_report import SyncReport
from tests.support.engine_keys import KEYS
from tests.support.engines import VOCAB_SIZE, save_tiny_moe
from tests.support.image_prompts import make_image, make_patches
from tests.support.stored import fetch_nothing, make_stored
from tests.support.sync_stage import Stage, call, open_stage


class TransformersTrainer:
    """transformers in the place of the training ranks."""

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        self.model = model

    @torch.no_grad()
    def compute_logprobs(
        self, batch: TrainBatch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores[Tensor]:
        assert options.temperature == 1.0
        parts = []
        for tokens in batch.token_ids_T.split(list(batch.lens_N)):
            logprobs = self.model(tokens[None]).logits[0].log_softmax(-1)
            parts += [torch.zeros(1), logprobs[:-1].gather(-1, tokens[1:, None])[:, 0]]
        return TokenScores(torch.cat(parts))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with EngineProcess(
        EngineSpec(model_path, str(tmp_path_factory.mktemp("log") / "engine.log"))
    ) as engine:
        yield engine


def make_batch() -> TrainBatch:
    lens_N = (7, 12, 5)
    ids_T = torch.randint(3, VOCAB_SIZE, (sum(lens_N),), generator=torch.Generator().manual_seed(0))
    return TrainBatch(ids_T, torch.ones(sum(lens_N), dtype=torch.bool), lens_N)


async def ready() -> None:
    """Engines always are, here."""


def make_parity_check(
    trainer: Any,
    config: ParityCheckConfig | None = None,
    *,
    dtype: str = "float32",
    timeout_s: float = 1.0,
    ready: Callable[[], Awaitable[None]] = ready,
    keys: ServerKeys | None = None,
    fetch: Callable[[StoredBatch], TrainBatch] = fetch_nothing,
    **options: Any,
) -> ParityCheck:
    config = config or ParityCheckConfig()
    tolerance = ParityTolerance(config, dtype)
    return ParityCheck(trainer, config, tolerance, timeout_s, ready, keys, fetch, **options)


def make_prompt(*token_ids: int) -> Prompt:
    return Prompt(0, token_ids, (), "unit", "")


def test_the_probe_is_made_of_the_first_prompts_that_can_be_scored() -> None:
    prompts = [make_prompt(5), make_prompt(1, 2, 3), make_prompt(*range(400)), make_prompt(7, 8)]
    probe = make_probe(prompts, num_sequences=2)
    assert probe.lens_N == (3, MAX_PROMPT_TOKENS, 2)
    assert probe.token_ids_T.tolist() == [1, 2, 3, *range(MAX_PROMPT_TOKENS), 7, 8]
    assert not probe.loss_mask_T.any()
    assert make_probe(prompts[:1], num_sequences=2).lens_N == ()
    assert make_probe(prompts, num_sequences=0).lens_N == ()
    assert make_probe([make_prompt(*range(300))] * 9, num_sequences=2).lens_N == (256,) * 5
    assert make_probe([make_prompt(*range(300))] * 9, num_sequences=7).lens_N == (256,) * 7
    assert make_probe([make_prompt(1, 2)] * 99, num_sequences=2).lens_N == (2,) * MOST_SEQUENCES


@pytest.mark.parametrize(
    ("lens", "chosen"),
    [
        ([30] * 256, [i * 256 // 36 for i in range(36)]),
        ([300] * 256, [0, 64, 128, 192]),
        ([3] * 256, [4 * i for i in range(64)]),
        ([1] * 256, [4 * i for i in range(64)]),
        ([30] * 5, [0, 1, 2, 3, 4]),
    ],
    ids=["short", "long", "too short", "one token", "few"],
)
def test_sequences_are_taken_from_all_over_the_batch_until_they_have_enough_tokens(
    lens: list[int], chosen: list[int]
) -> None:
    """The first token of each tells which sequence it is; four of 30 tokens say too little."""
    ids = [token for n, length in enumerate(lens) for token in [n] * length]
    batch = TrainBatch(torch.tensor(ids), torch.ones(len(ids)).bool(), tuple(lens))
    nobody: Any = None
    probe = make_parity_check(nobody)._choose(len(lens), partial(select, batch))
    assert probe is not None
    assert [int(part[0]) for part in probe.token_ids_T.split(list(probe.lens_N))] == chosen
    is_enough = sum(probe.lens_N) - len(probe.lens_N) >= MIN_TOKENS
    assert is_enough or len(chosen) == min(MOST_SEQUENCES, len(lens))


@pytest.mark.parametrize("sequences", [0, 2])
def test_without_a_sequence_to_score_nothing_is_asked(sequences: int) -> None:
    """Neither trainer nor engine exists: a call to one of them would fail."""
    nobody: Any = None
    parity_check = make_parity_check(nobody, ParityCheckConfig(sequences=sequences))
    batch = make_probe([make_prompt(5)], 2) if sequences else make_batch()
    parity_check.score_sequences(WeightVersion(0), batch)
    report = asyncio.run(parity_check.check(["http://127.0.0.1:9"]))
    assert report.failed == {} and report.metrics() == {}


@pytest.mark.slow
@pytest.mark.e2e
def test_engines_that_compute_otherwise_are_named(model_path: str, engine: EngineProcess) -> None:
    model = Qwen3MoeForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    parity_check = make_parity_check(TransformersTrainer(model), timeout_s=20.0)
    absent = "http://127.0.0.1:9"
    parity_check.score_sequences(WeightVersion(5), make_batch())
    report = asyncio.run(parity_check.check([engine.url, absent]))
    assert report.differences[engine.url].mean < 1e-4
    assert (
        set(report.failed) == {absent}
        and f"engine {absent} scored nothing" in report.failed[absent]
    )
    assert report.metrics()["sync/parity_diff"] == report.differences[engine.url].mean

    with torch.no_grad():
        model.get_parameter("model.layers.1.self_attn.o_proj.weight").add_(0.05)
    parity_check.score_sequences(WeightVersion(6), make_batch())
    report = asyncio.run(parity_check.check([engine.url]))
    assert report.differences[engine.url].mean > 1e-3
    assert (
        "claims weights 6" in report.failed[engine.url]
        and "parity_check.tolerance" in report.failed[engine.url]
    )


class CorruptingController(SyncController):
    """After a sync succeeded, the engines in `corrupt` load the weights of another checkpoint."""

    corrupt: Sequence[str] = ()
    other_checkpoint = Path()

    async def sync(self, version: int, urls: Sequence[str] | None = None) -> SyncReport:
        report = await super().sync(version, urls)
        for url in self.corrupt:
            path = str(self.other_checkpoint)
            answer = await asyncio.to_thread(
                call, url, "/update_weights_from_disk", model_path=path
            )
            assert answer["success"], answer
        return report


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with open_stage(tmp_path_factory.mktemp("stage"), (1, 1), timeout_s=30) as stage:
        yield stage


@pytest.mark.e2e
@pytest.mark.slow
def test_an_engine_serves_only_once_it_agreed_at_the_start_and_on_its_return(stage: Stage) -> None:
    """One of two engines is corrupted after its first sync; the other dies and is corrupted on its
    return.
    """
    good, bad = stage.engines
    health = EngineHealth(stage.urls)
    states = [EngineState(url) for url in stage.urls]
    loop = EventLoop()

    async def look() -> None:
        health.note(states)

    links = CorruptingController(stage.ranks, bucket_mib=0.0625, timeout_s=30, keys=KEYS)
    links.corrupt, links.other_checkpoint = [bad.url], stage.checkpoints[1]
    model = Qwen3MoeForCausalLM.from_pretrained(stage.checkpoints[0], dtype=torch.float32).eval()
    gpus = SharedGpus(EngineMemory((), 30.0), loop.run)
    trainer = TransformersTrainer(model)
    parity_check = make_parity_check(trainer, timeout_s=30.0, ready=gpus.for_rollout, keys=KEYS)
    weights = EngineSync(links, parity_check, health, look, loop.run, gpus, lambda: 0)
    weights.sync_first(WeightVersion(0), make_probe([make_prompt(*range(3, 40))], 2))
    assert health.serving == [good.url]
    assert "parity_check.tolerance" in health.why_out(bad.url)

    good.stop()
    returned = EngineProcess(good.spec)
    returned.start()
    try:
        returned.wait_healthy()
        states[0] = EngineState(good.url, restarts=1)
        health.note(states)
        assert health.serving == []
        links.corrupt = stage.urls
        with pytest.raises(
            SyncError, match=rf"{good.url} claims weights 0.*parity_check.tolerance"
        ):
            loop.run(weights.revive())
        assert health.serving == []
    finally:
        returned.stop()
        loop.close()


def test_a_probe_is_made_of_sequences_that_are_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    stores, _, samples = make_stored(2)
    batch = make_stored_batch(samples)
    lost = {0}

    def fetch(probe: StoredBatch) -> TrainBatch:
        found = lost & set(probe.store_N.tolist())
        if found:
            raise SamplesLostError(f"collectors {sorted(found)} died", found)
        return assemble(probe, stores.read)

    nobody: Any = None
    parity_check = make_parity_check(nobody, ParityCheckConfig(sequences=3), fetch=fetch)
    probe = parity_check._choose_samples(batch)
    kept = np.flatnonzero(batch.store_N == 1).tolist()
    assert probe is not None and probe.lens_N == tuple(batch.lens_N[i] for i in kept)
    lost |= {1}
    assert parity_check._choose_samples(batch) is None
    assert "collectors [0, 1] died; no sequence is left" in caplog.text


class CountingTrainer:
    """Gives token t of a batch the log-prob -t."""

    def compute_logprobs(
        self, batch: TrainBatch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores[Tensor]:
        return TokenScores(-torch.arange(len(batch.token_ids_T), dtype=torch.float32))


def measured(probe: ScoredProbe, own: Sequence[Sequence[float]]) -> float:
    return EngineDifference.measure(probe.trainer_logprobs, own, probe.is_compared).mean


@pytest.mark.parametrize("mark", [90, 8], ids=["placeholder", "start"])
def test_sequences_with_images_are_compared_up_to_a_sampled_mark(mark: int) -> None:
    """Engines take each placeholder for a piece of an image, and score those as nothing. At a start
    that nothing follows, SGLang's search for images fails.
    """
    image = make_image("a")
    ids = [1, 90, 90, 2, 5, 6, mark, 7]
    sampled = [False] * 4 + [True] * 4
    batch = TrainBatch(
        token_ids_T=torch.tensor([*ids, *ids]),
        loss_mask_T=torch.tensor([*sampled, *sampled]),
        lens_N=(8, 8),
        images=join_patches([[make_patches(image)], []]),
    )
    config = ParityCheckConfig(sequences=2)
    parity_check = make_parity_check(CountingTrainer(), config, image_marks=(90, 8))
    parity_check.score_sequences(WeightVersion(3), batch)
    probe = parity_check._probe
    assert probe is not None
    assert probe.sequences == [ids[:6], ids]
    assert [mask.tolist() for mask in probe.is_compared] == [
        [False, False, False, True, True],
        [True] * 7,
    ]
    assert [images is None for images in probe.images] == [False, True]
    own = [part.tolist() for part in probe.trainer_logprobs]
    assert measured(probe, own) == 0.0
    own[0][0] += 100.0  # what an engine says of a placeholder
    assert measured(probe, own) == 0.0
    own[0][3] += 9.0
    difference = measured(probe, own)
    assert difference == pytest.approx(1.0)
