"""The layer by which an engine guesses is synced with the policy, of seven families.

version   policy              its layer
0         random              random
1, 2      two bigram models   predicts what the model finds best: every greedy guess is right
3         another one         random
"""

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from mcore_rl.rollout.drafts import read_counts, sum_counts
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.run.links import make_record
from mcore_rl.types import DraftCount, WeightVersion
from mcore_rl.weight_sync.controller.sync import SyncController
from mcore_rl.weights.hf.config import ModelFacts
from tests.support.chi_square import fit_of_draws
from tests.support.engine_keys import KEYS
from tests.support.megatron_ranks import MegatronRanks
from tests.support.megatron_run import TIMEOUT_S, MegatronRun, make_config, start_engines
from tests.support.tiny_mtp import write_bigram_model, write_mtp_model

pytestmark = pytest.mark.e2e

PROMPTS = [[3, 4, 5], [6], [7, 8], [9]]
GUESSES = 2
DEADLINE_S = 300.0


@dataclass
class Trainer:
    """One rank of Megatron, an engine that speculates, and a folder for each version."""

    ranks: MegatronRanks
    engine: EngineProcess
    versions: list[Path]
    sizes: dict[str, int]
    agreed: str

    def connect(self, version: int) -> SyncController:
        """Have the rank hold a version, and link the engine to it."""
        config = make_drafting_config(self.versions[version])
        self.ranks.build(config)
        policy = ModelFacts.read(config.model.path)
        controller = SyncController(
            self.ranks,
            timeout_s=TIMEOUT_S,
            keys=KEYS,
            verify_every=1,
            record=make_record(config.model, config.parallel, config.rollout, policy),
        )
        asyncio.run(controller.connect([self.engine.url]))
        assert controller.get_agreed_layouts(self.engine.url).split()[0] == self.agreed
        return controller

    def sync(self, version: int, controller: SyncController | None = None) -> None:
        report = asyncio.run((controller or self.connect(version)).sync(version))
        assert not report.failed, report.failed

    def draw(
        self, temperature: float, num_tokens: int = 30, num_prompts: int = len(PROMPTS)
    ) -> list[dict[str, Any]]:
        parameters = {"temperature": temperature, "max_new_tokens": num_tokens, "ignore_eos": True}
        prompts = PROMPTS[:num_prompts]
        asked = {"input_ids": prompts, "sampling_params": parameters, "return_logprob": True}
        return self._ask("/generate", json.dumps(asked).encode())

    def wait_until_drawing(self) -> None:
        """Wait until the engine is drawing tokens."""
        until_s = time.monotonic() + DEADLINE_S
        while not any(load["num_running_reqs"] for load in self._ask("/v1/loads")["loads"]):
            assert time.monotonic() < until_s

    def _ask(self, path: str, body: bytes | None = None) -> Any:
        headers = {"Content-Type": "application/json", **KEYS.user_headers}
        request = urllib.request.Request(f"{self.engine.url}{path}", body, headers)
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            return json.load(response)


def make_drafting_config(hf_dir: Path, when: str = "always") -> Any:
    config = make_config(hf_dir, {})
    rollout = replace(
        config.rollout,
        speculate="mtp",
        speculate_tokens=GUESSES,
        speculate_when=when,
        deterministic=False,
    )
    return replace(config, rollout=rollout, train=replace(config.train, mtp_loss=0.3))


CASES: dict[str, tuple[str, dict[str, int], str]] = {
    "deepseek_v3": ("deepseek_v3", {}, "recorded"),
    "glm4_moe": ("glm4_moe", {}, "recorded"),
    "glm4_moe_lite": ("glm4_moe_lite", {}, "recorded"),
    "hunyuan_v3": ("hunyuan_v3", {}, "recorded"),
    "qwen3_next": ("qwen3_next", {}, "recorded"),
    "qwen3_5_moe": ("qwen3_5_moe", {}, "recorded"),
    "qwen3_5": ("qwen3_5", {}, "recorded"),
    "deepseek_v3-cut": ("deepseek_v3", {"tp": 2, "ep": 2}, "listed"),
    "qwen3_next-cut": ("qwen3_next", {"tp": 2, "ep": 2}, "recorded"),
}
"""A family, an engine's sizes, and how the layouts are found: see test_families.py."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] * (name != "deepseek_v3")) for name in CASES
    ],
)
def trainer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trainer]:
    folder = tmp_path_factory.mktemp("drafts")
    kind, sizes, agreed = CASES[request.param]
    begun = write_mtp_model(kind, folder / "0")
    others = [write_bigram_model(begun, folder / str(n), n, guesses=n < 3) for n in range(1, 4)]
    [engine] = start_engines(make_drafting_config(begun), folder, [sizes])
    ranks = MegatronRanks(1)
    try:
        engine.wait_healthy()
        yield Trainer(ranks, engine, [begun, *others], sizes, agreed)
    finally:
        engine.stop()
        ranks.stop()


@pytest.fixture(scope="module")
def choosing(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """The same with an engine that guesses where it measures that guessing is faster."""
    config = make_drafting_config(trainer.versions[0], "faster")
    folder = tmp_path_factory.mktemp("choosing")
    [engine] = start_engines(config, folder, [trainer.sizes])
    try:
        engine.wait_healthy()
        yield replace(trainer, engine=engine)
    finally:
        engine.stop()


def accepted_share(answers: Sequence[dict[str, Any]], version: int) -> float:
    """Return the share of guesses that weights of this version accepted."""
    told = [read_counts(answer["meta_info"]) for answer in answers]
    count = sum_counts(*told)[WeightVersion(version)]
    return count.accepted / (GUESSES * count.checked)


def load_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def score(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the logits of what follows each token but the last."""
    return model(torch.tensor([token_ids])).logits[0, :-1]


def largest_error(answers: Sequence[dict[str, Any]], versions: Sequence[Path]) -> float:
    """Return by how much log-probs differ from those of the version that tokens name."""
    models = [load_model(version) for version in versions]
    largest = 0.0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = torch.tensor(prompt + answer["output_ids"])
        told = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        for span in answer["meta_info"]["weight_versions"]:
            logits = score(models[int(span["version"])], tokens.tolist())[len(prompt) - 1 :]
            logprobs = torch.log_softmax(logits, -1).gather(1, tokens[len(prompt) :, None])[:, 0]
            of_span = slice(span["start"], span["end"])
            error = (logprobs[of_span] - torch.tensor(told[of_span])).abs().max()
            largest = max(largest, float(error))
    return largest


def test_guesses_follow_the_policy(trainer: Trainer) -> None:
    shares = []
    for version in range(1, 4):
        trainer.sync(version)
        answers = trainer.draw(temperature=0.0)
        shares.append(accepted_share(answers, version))
        assert largest_error(answers, trainer.versions) < 1e-5
    assert shares[:2] == [1.0, 1.0] and shares[2] < 0.5, shares


def fit_of(draws: Sequence[Sequence[dict[str, Any]]], version: Path) -> float:
    """Return the p-value of a chi-square test of the tokens that weights have drawn."""
    model = load_model(version)
    logprobs, tokens = [], []
    for answers in draws:
        for prompt, answer in zip(PROMPTS, answers, strict=False):
            drawn = torch.tensor(answer["output_ids"])
            logits = score(model, [*prompt, *answer["output_ids"]])[len(prompt) - 1 :]
            logprobs.append(torch.log_softmax(logits.double(), -1))
            tokens.append(drawn)
    return fit_of_draws(torch.cat(logprobs), torch.cat(tokens))


@pytest.mark.slow
def test_tokens_are_drawn_with_the_policys_probabilities(trainer: Trainer) -> None:
    trainer.sync(1)
    draws = [trainer.draw(1.0, 240) for _ in range(2)]
    assert 0.1 < accepted_share([answer for answers in draws for answer in answers], 1) < 1
    assert fit_of(draws, trainer.versions[1]) > 1e-4


def count_passes(answers: Sequence[dict[str, Any]], version: int) -> DraftCount:
    counts = sum_counts(*(read_counts(answer["meta_info"]) for answer in answers))
    assert counts.keys() == {version}
    return counts[WeightVersion(version)]


@pytest.mark.slow
def test_an_engine_guesses_where_that_is_faster(choosing: Trainer) -> None:
    """Tokens and log-probs are right while passes take turns to be measured, and afterwards."""
    choosing.sync(1)
    draws = [choosing.draw(1.0, 240, num_prompts) for num_prompts in (1, 2, 4)]
    measured = [answer for answers in draws for answer in answers]
    measuring = count_passes(measured, 1)
    print(measuring)
    assert measuring.plain > 3 * 32 and 0.1 < accepted_share(measured, 1) < 1
    assert fit_of(draws, choosing.versions[1]) > 1e-4
    gains = []
    for version in (2, 3, 1):
        choosing.sync(version)
        answers = choosing.draw(0.0, 240)
        assert largest_error(answers, choosing.versions) < 1e-5
        count = count_passes(answers, version)
        print(version, count)
        drafted = count.checked / (count.checked + count.plain)
        assert drafted < 0.1 if version == 3 else drafted > 0.9, (version, count)
        gains.append(count.gain / count.rated)
    assert gains[1] < 1 < min(gains[0], gains[2]), gains


def test_weights_change_within_responses(trainer: Trainer) -> None:
    trainer.sync(1)
    following = trainer.connect(2)
    with ThreadPoolExecutor(1) as pool:
        drawing = pool.submit(trainer.draw, 1.0, 240)
        trainer.wait_until_drawing()
        trainer.sync(2, following)
        answers = drawing.result()
    spans = [answer["meta_info"]["weight_versions"] for answer in answers]
    assert any([span["version"] for span in of_answer] == ["1", "2"] for of_answer in spans), spans
    assert largest_error(answers, trainer.versions) < 1e-5
    assert 0.1 < accepted_share(answers, 1) < 1 and 0.1 < accepted_share(answers, 2) < 1


@pytest.mark.slow
def test_a_run_draws_with_the_layer_that_it_trains(trainer: Trainer, tmp_path: Path) -> None:
    """Two steps of GRPO, which replay the experts that engines chose: the second one samples with
    the policy and the layer of the first.
    """
    config = make_drafting_config(trainer.versions[1])
    config = replace(config, run=replace(config.run, steps=6))
    trainer.ranks.build(config)
    with MegatronRun(config, trainer.ranks, [trainer.engine], tmp_path) as run:
        run.train(4)
    metrics = run.log.metrics
    print({name: metrics[name] for name in metrics if name.startswith(("drafts/", "mtp/"))})
    assert {span.version for sample in run.log.samples for span in sample.versions} == {5}
    assert metrics["drafts/version"] == 5 and metrics["drafts/tokens_per_pass"] > 1.1
    assert metrics["mtp/loss"] > 0
    has_experts = ModelFacts.read(trainer.versions[1]).has_experts
    assert metrics.get("logprob_diff/router_flip_share") == (0 if has_experts else None)
    assert metrics["logprob_diff/token_max"] < 1e-4 and metrics["sync/parity_diff"] < 1e-4
