"""GRPO with factors that engines serve as an adapter: Megatron ranks, real SGLang engines."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoint_tools.cli import main
from mcore_rl.config import Config, LoraConfig
from mcore_rl.rollout.engine import EngineProcess
from tests.support.megatron_ranks import MegatronRanks
from tests.support.megatron_run import MegatronRun, make_config, start_engines
from tests.support.sync_stage import PROMPT, call, generate, logprob_error, served_version
from tests.support.tiny_models import write_model
from tests.support.tiny_training import NUM_TOKENS, make_batches

pytestmark = pytest.mark.e2e
TOLERANCE = 1e-4
EXACT = 1e-5
STEPS = 2
NUM_DRAWN = 200
HEAD = {"temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Case:
    """A family, the trainer's layout, the engine's sizes, and what is adapted."""

    kind: str
    layout: dict[str, int]
    engine: dict[str, int]
    targets: tuple[str, ...]


CASES = {
    # SGLang gets zeros for joined projections without factors.
    "dense": Case("qwen3", {"pp": 2}, {}, ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")),
    "experts": Case(
        "qwen3_moe",
        {"tp": 2, "ep": 2},
        {"tp": 2, "ep": 2},
        ("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
}


@pytest.fixture
def ranks() -> Iterator[MegatronRanks]:
    ranks = MegatronRanks(2)
    yield ranks
    ranks.stop()


def make_lora_config(case: Case, folder: Path) -> Config:
    base = write_model(case.kind, folder / "base")
    config = make_config(base, case.layout, STEPS, routed_experts=False)
    lora = LoraConfig(rank=4, rslora=True, targets=list(case.targets), sync="adapter")
    optimizer = replace(config.train.optimizer, lr=2e-2)
    train = replace(config.train, lora=lora, optimizer=optimizer)
    return replace(config, train=train)


class Merged:
    """Writes the trainer's merged weights as a HuggingFace directory, by the tools' own command."""

    def __init__(self, ranks: MegatronRanks, base: str, folder: Path) -> None:
        self._ranks = ranks
        self._base = base
        self._folder = folder

    def write(self, name: str) -> Path:
        saved, merged = self._folder / f"{name}.saved", self._folder / name
        self._ranks.save(saved, {})
        self._ranks.finish_save()
        assert main(["merge-lora", str(saved), str(merged), "--source-hf", self._base]) == 0
        return merged


def sync_in_flight(url: str, sync: Callable[[], Any]) -> Any:
    """The answer to a request that is being drawn while `sync` is called."""
    sampling = HEAD | {"max_new_tokens": NUM_DRAWN}
    with ThreadPoolExecutor(1) as pool:
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        answer = pool.submit(lambda: call(url, "/generate", **body))
        time.sleep(0.2)
        generate(url, 1)  # It is answered once the other request is being drawn.
        assert not answer.done()
        assert not sync().failed
        return answer.result(60)


def check_spans(answer: Any, merged: Sequence[Path], versions: Sequence[int]) -> None:
    """Each token has the log-prob of the weights of the version that it is labeled with."""
    meta = answer["meta_info"]
    spans = meta["weight_versions"]
    assert [span["version"] for span in spans] == [str(version) for version in versions]
    own_T = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
    ids = [*PROMPT, *answer["output_ids"]]
    for span, folder in zip(spans, merged, strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logprobs_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        drawn_T = torch.tensor(answer["output_ids"])
        expected_T = logprobs_TV[len(PROMPT) - 1 : -1].gather(1, drawn_T[:, None])[:, 0]
        part = slice(span["start"], span["end"])
        assert (own_T[part] - expected_T[part]).abs().max() < EXACT, span


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_engines_serve_what_the_trainer_holds(
    ranks: MegatronRanks, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    config = make_lora_config(case, tmp_path)
    base = Path(config.model.path)
    engines = start_engines(config, tmp_path, [case.engine])
    try:
        ranks.build(config)
        engines[0].wait_healthy()
        refuse_before_a_version(engines[0])
        with MegatronRun(config, ranks, engines, tmp_path / "run", loaded=True) as run:
            run.train(0)
            metrics, url = run.log.metrics, engines[0].url
            assert metrics["logprob_diff/token_max"] < TOLERANCE
            assert metrics["logprob_diff/stale_share"] == 0
            assert 0 < metrics["sync/parity_diff"] < TOLERANCE
            assert metrics["sync/engines_verified"] == 1
            merged = Merged(ranks, str(base), tmp_path)
            before = merged.write("before")
            at_base = generate(url, lora_path="base")
            assert logprob_error(base, at_base) < EXACT < logprob_error(before, at_base)
            # A prompt that is not in the cache is computed at once, in other last bits.
            cached = generate(url, lora_path="base")
            answer = generate(url)
            assert logprob_error(before, answer) < EXACT < logprob_error(base, answer)
            assert generate(url, lora_path="policy")["output_ids"] == answer["output_ids"]

            ranks.train_step([make_batches()], temperature=1.0, num_tokens=NUM_TOKENS)
            after = merged.write("after")
            controller = run.sync_controller
            moved = sync_in_flight(url, lambda: asyncio.run(controller.sync(STEPS + 1)))
            check_spans(moved, (before, after), (STEPS, STEPS + 1))
            # The prompt's prefix was cached with the version before.
            assert logprob_error(after, generate(url)) < EXACT
            again = generate(url, lora_path="base")
            assert (
                again["meta_info"]["output_token_logprobs"]
                == (cached["meta_info"]["output_token_logprobs"])
            )
            assert served_version(url) == str(STEPS + 1)
            refused = generate(url, lora_path="another")
            assert "lora_path='another': one of policy, base" in str(refused), refused
    finally:
        for engine in engines:
            engine.stop()


def refuse_before_a_version(engine: EngineProcess) -> None:
    """Without a version of the adapter, the weights alone do not answer in its name."""
    assert "has no version yet" in str(generate(engine.url))
