"""Random episodes over every family's template train what a real engine sampled, and nothing else.

Log-probs of rows, as they are trained, are those of transformers in float32.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from mcore_rl.agents.recorder import EpisodeLimits
from mcore_rl.batches.batch import split_by_lens
from mcore_rl.batches.episodes import sample_of_episode
from mcore_rl.config import RolloutConfig
from mcore_rl.rollout.client import RolloutClient, RolloutSession
from mcore_rl.rollout.collector import GroupRequest
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.transport import HttpOptions
from mcore_rl.types import Prompt, Sample, TrainBatch
from mcore_rl.workers.episodes import make_turn_sampler
from tests.support.chat_templates import FAMILIES, stop_ids
from tests.support.laid_out import make_train_batch
from tests.support.random_episodes import (
    KINDS,
    WITHOUT_CALLS,
    RandomEpisode,
    check_rows,
    marking_tokenizer,
    num_reencoded,
)
from tests.support.row_scores import RowScorer
from tests.support.stand_in_policy import StandInPolicy
from tests.support.tiny_models import write_model

LIMITS = EpisodeLimits(max_turns=20, max_turn_len=12, max_tokens=6000)
QUICK = ("qwen3", "deepseekv3", "gptoss")
"""Families of `make test`."""
AT_ONCE = 32
TOLERANCE = 1e-4
DEADLINE_S = 500.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model: rounding cannot send a token to another expert."""
    sizes = {"vocab_size": 320, "max_position_embeddings": 8192, "num_hidden_layers": 2}
    return write_model("qwen3", tmp_path_factory.mktemp("exact") / "model", **sizes)


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[EngineProcess]:
    log_path = str(model_dir.parent / "engine.log")
    spec = EngineSpec(str(model_dir), log_path, kv_cache_len=2**18, max_running=AT_ONCE)
    with EngineProcess(spec) as engine:
        yield engine


async def play(session: RolloutSession, family: str, seed: int) -> tuple[Sample, RandomEpisode]:
    prompt = Prompt(seed, (1,), (), "unit", None)
    request = GroupRequest(0, seed, prompt, 1, Sampling(LIMITS.max_turn_len))
    episode = RandomEpisode(family, seed, make_turn_sampler(session, request, 0), LIMITS)
    record = await episode.play()
    check_rows(record, episode.asked)
    return sample_of_episode(prompt, 0, record, ""), episode


def play_all(
    engine: EngineProcess, family: str, num_episodes: int
) -> list[tuple[Sample, RandomEpisode]]:
    config = RolloutConfig(max_concurrency=AT_ONCE, request_timeout_s=120)
    http = HttpOptions.make(config, stop_ids(family), str)
    client = RolloutClient([engine.address], config, http.open)

    async def run() -> list[tuple[Sample, RandomEpisode]]:
        places = asyncio.Semaphore(AT_ONCE)

        async def play_in_place(session: RolloutSession, seed: int) -> tuple[Sample, RandomEpisode]:
            async with places:
                return await play(session, family, seed)

        async with asyncio.timeout(DEADLINE_S), client.open() as session:
            return await asyncio.gather(
                *(play_in_place(session, seed) for seed in range(num_episodes))
            )

    return asyncio.run(run())


def largest_error(model_dir: Path, batch: TrainBatch) -> float:
    """Return how far the log-probs of trained tokens are from those of transformers."""
    assert batch.rollout_logprobs_T is not None
    rows = [row.numpy() for row in split_by_lens(batch.token_ids_T, batch.lens_N)]
    scored_T = torch.cat([torch.from_numpy(own) for own in RowScorer(model_dir)(rows)])
    return float((scored_T - batch.rollout_logprobs_T)[batch.loss_mask_T].abs().max())


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("family", "num_episodes"),
    [
        *((family, 14) for family in QUICK),
        *(pytest.param(f, 14, marks=pytest.mark.slow) for f in FAMILIES if f not in QUICK),
        *(pytest.param(f, 143, marks=pytest.mark.slow) for f in FAMILIES),
    ],
)
def test_rows_train_what_the_engine_sampled(
    engine: EngineProcess, model_dir: Path, family: str, num_episodes: int
) -> None:
    began_s = time.monotonic()
    played = play_all(engine, family, num_episodes)
    played_s = time.monotonic() - began_s
    did = sum((episode.did for _, episode in played), Counter[str]())
    num_answers = num_context = 0
    for _, episode in played:
        in_answers, elsewhere = num_reencoded(episode.recorder.tree, episode.asked)
        num_answers += in_answers
        num_context += elsewhere
    batch = make_train_batch([sample for sample, _ in played])
    error = largest_error(model_dir, batch)
    print(
        f"{family}: {len(played)} episodes, {len(batch.lens_N)} rows of {sum(batch.lens_N)} tokens,"
        f" {int(batch.loss_mask_T.sum())} trained, {error=:.2g}, {played_s:.1f} s to play,"
        f" {time.monotonic() - began_s - played_s:.1f} s to score, {dict(did)}"
    )
    assert did.keys() >= set(KINDS), did
    assert did["calls"] or family in WITHOUT_CALLS
    assert num_answers == 0 < num_context
    assert error < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_that_went_through_text_are_counted(family: str) -> None:
    """An engine that gives text instead of ids makes a caller tokenize what was sampled."""
    tokenizer = marking_tokenizer(family)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    policy = StandInPolicy(["one", "two {", "three"], encode, stop_ids(family)[0])
    episode = RandomEpisode(family, 3, policy, LIMITS)
    record = asyncio.run(episode.play())
    check_rows(record, episode.asked)
    in_answers, elsewhere = num_reencoded(episode.recorder.tree, episode.asked)
    num_sampled = sum(len(answer) for _, answer in episode.asked)
    assert in_answers >= num_sampled - len(episode.asked) > 0 < elsewhere
