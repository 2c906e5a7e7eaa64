"""Keys that train are those that drew: what an engine computes again changes none of them.

transformers computes which keys each token chooses with the weights that drew the next one.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from mcore_rl.config import RolloutConfig
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.engine import FORKS, EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.indexer_topk import IndexerTopkShape
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.transport import HttpOptions
from mcore_rl.types import Sample
from tests.scenarios.rollout.test_first_experts import Reported, reported_of_sample
from tests.scenarios.rollout.test_moved_responses import draw_with_moves
from tests.support.engines import serve_versions
from tests.support.sampled import make_prompts
from tests.support.sparse_choices import Chooser, mark_chosen
from tests.support.tiny_models import MODELS, write_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KIND = "deepseek_v32"
LAYERS = 2
SHAPE = IndexerTopkShape(LAYERS, MODELS[KIND][1]["index_topk"])
MOST_OTHER = 2e-3
"""Share of queries whose least chosen key may be another: scores that differ by rounding."""


def share_of_wrong(
    of_version: Callable[[int], Chooser], all_reported: list[Reported]
) -> dict[str, float]:
    """Return shares of queries for which other weights chose than expected.

    first   expected are the weights that drew the next token
    last    expected are the weights that drew the last one: what engines report by themselves
    """
    num_wrong = {"first": 0, "last": 0}
    num_queries = 0
    for reported in all_reported:
        drawn_by = reported.next_versions()
        token_ids = reported.token_ids_T.tolist()
        chosen = {v: of_version(v)(token_ids)[1] for v in set(drawn_by)}
        own_TLT = mark_chosen(reported.choices_TLK.numpy(), len(token_ids))
        for t, version in enumerate(drawn_by):
            for how, expected in (("first", version), ("last", drawn_by[-1])):
                wrong_L = (chosen[expected][t] != own_TLT[t]).any(-1)
                num_wrong[how] += int(wrong_L.sum())
            num_queries += LAYERS
    return {how: number / num_queries for how, number in num_wrong.items()}


def write_models(folder: Path, seeds: tuple[int, ...]) -> dict[int, Path]:
    sizes = {"num_hidden_layers": LAYERS, "vocab_size": 320, "max_position_embeddings": 2048}
    return {seed: write_model(KIND, folder / str(seed), seed, **sizes) for seed in seeds}


def draw_while_weights_change(engine: EngineProcess, paths: dict[int, Path]) -> list[Sample]:
    """Return samples of an engine that loads the weights of each path, one after the other."""
    config = RolloutConfig(request_timeout_s=120.0)
    http = HttpOptions.make(config, [], str, indexer_shape=SHAPE)
    client = RolloutClient([engine.address], config, http.open)
    sampling = Sampling(200, indexer_topk=True)

    async def draw() -> list[Sample]:
        async with client.open() as session:
            work = asyncio.ensure_future(session.generate(make_prompts(4), 2, sampling))
            for version, path in paths.items():
                await asyncio.sleep(0.7)
                for name, body in (
                    ("pause_generation", {"mode": "retract"}),
                    (
                        "update_weights_from_disk",
                        {"model_path": str(path), "weight_version": str(version)},
                    ),
                    ("continue_generation", {}),
                ):
                    url = f"{engine.address.url}/{name}"
                    answer = await asyncio.to_thread(requests.post, url, json=body, timeout=60)
                    answer.raise_for_status()
            return await work

    return asyncio.run(draw())


def test_tokens_keep_the_keys_that_were_chosen_as_they_were_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights change inside responses, and requests are retracted meanwhile.

    SGLang retracts requests at every seventh pass, as if its KV cache were full.
    """
    monkeypatch.delenv(FORKS, raising=False)
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "7")
    paths = write_models(tmp_path, (0, 1, 2))
    log = tmp_path / "engine.log"
    spec = EngineSpec(str(paths[0]), str(log), indexer_topk=True)
    with EngineProcess(spec) as engine:
        samples = draw_while_weights_change(engine, {n: paths[n] for n in (1, 2)})
    choosers = {n: Chooser(path) for n, path in paths.items()}
    reported = [reported_of_sample(sample, "indexer_topk") for sample in samples]
    wrong = share_of_wrong(choosers.__getitem__, reported)
    num_changed = sum(len(sample.versions) > 1 for sample in samples)
    num_retracted = log.read_text().count("Testing retraction")
    print(f"{num_changed} changed, {num_retracted} retractions, wrong: {wrong}")
    assert num_changed > 3 and num_retracted > 3
    assert wrong["first"] < MOST_OTHER and wrong["last"] > 0.1


def test_a_response_keeps_the_keys_of_the_engine_that_it_left(tmp_path: Path) -> None:
    """The two engines serve other weights, so each chooses other keys for the same tokens."""
    paths = write_models(tmp_path, (7, 8))
    with serve_versions(paths, tmp_path, indexer_topk=True) as engines:
        samples, num_moved = draw_with_moves(engines, key_shape=SHAPE)
    choosers = {n: Chooser(path) for n, path in paths.items()}
    moved = [sample for sample in samples if len(sample.versions) == 2]
    assert num_moved >= 1 and moved
    reported = [reported_of_sample(sample, "indexer_topk") for sample in moved]
    wrong = share_of_wrong(choosers.__getitem__, reported)
    assert wrong["first"] < MOST_OTHER and wrong["last"] > 0.01
