"""Engines of DeepSeek-V3.2 and GLM-5 attend to the keys that indexers of transformers choose.

Requests of unlike lengths run together, in chunks, behind cached prefixes, on one rank and several.
"""

import asyncio
import base64
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v32 import modeling_deepseek_v32

from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.types import TrainBatch, WeightVersion
from tests.run.roles.test_parity_check import TransformersTrainer, make_parity_check
from tests.support.sparse_choices import Chooser, mark_chosen
from tests.support.tiny_models import MODELS, VOCAB, write_model

pytestmark = pytest.mark.e2e

TOLERANCE = 1e-5
MOST_OTHER = 2e-3
"""Share of queries whose least chosen key may be another: scores that differ by rounding."""
RESPONSE_LEN = 12


@dataclass(frozen=True)
class Case:
    """A family, the sizes of its engine, and whether SGLang reports chosen keys: not if attention
    is cut by ranks; settings of the model.
    """

    kind: str
    sizes: dict[str, Any] = field(default_factory=dict)
    reports: bool = True
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "deepseek_v32": Case("deepseek_v32"),
    "glm5": Case("glm5"),
    "deepseek_v32-cut": Case("deepseek_v32", {"tp": 2, "ep": 2}, reports=False),
    "glm5-groups": Case("glm5", {"tp": 2, "ep": 2, "attention_dp": 2}),
    "glm5-shared": Case("glm5", settings={"index_topk_freq": 2, "index_skip_topk_offset": 1}),
    "deepseek_v32-stages": Case("deepseek_v32", {"pp": 2}, reports=False),
}
SLOW = list(CASES)[1:]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_engines_attend_as_transformers_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = write_model(case.kind, tmp_path / "model", **case.settings)
    top_k = MODELS[case.kind][1]["index_topk"]
    flags = ["--chunked-prefill-size=16"] + ["--enable-return-indexer-topk"] * case.reports
    spec = EngineSpec(
        str(model), str(tmp_path / "engine.log"), extra_args=tuple(flags), **case.sizes
    )
    prompts = make_prompts()
    with EngineProcess(spec) as engine:
        engine.wait_healthy()
        url = engine.address.url
        with ThreadPoolExecutor(len(prompts)) as pool:
            first = list(pool.map(lambda ids: generate(url, ids, case.reports), prompts))
            again = list(pool.map(lambda ids: generate(url, ids, case.reports), prompts))
    assert any(answer["meta_info"]["cached_tokens"] > 60 for answer in first + again)
    chooser = Chooser(model)
    num_other = num_rows = 0
    for prompt, answer in zip(prompts * 2, first + again, strict=True):
        tokens = prompt + answer["output_ids"]
        logprobs_TV, wanted_TLT = chooser(tokens)
        for position, (logprob, token, _) in enumerate(
            answer["meta_info"]["output_token_logprobs"], len(prompt) - 1
        ):
            assert abs(logprob - logprobs_TV[position, token]) < TOLERANCE
        if case.reports:
            raw = base64.b64decode(answer["meta_info"]["indexer_topk"])
            positions_TLK = np.frombuffer(raw, np.int32).reshape(len(tokens) - 1, -1, top_k)
            other_TL = (mark_chosen(positions_TLK, len(tokens)) != wanted_TLT[:-1]).any(-1)
            num_other += other_TL.sum()
            num_rows += other_TL.size
    assert num_rows > 1000 or not case.reports
    assert num_other <= MOST_OTHER * num_rows


def turn_neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        modeling_deepseek_v32,
        "apply_rotary_pos_emb",
        modeling_deepseek_v32.apply_rotary_pos_emb_interleave,
    )


def keep_negative_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "relu", lambda products: products)


def choose_one_key_less(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = modeling_deepseek_v32.DeepseekV32Indexer.forward
    monkeypatch.setattr(
        modeling_deepseek_v32.DeepseekV32Indexer,
        "forward",
        lambda *args, **options: forward(*args, **options)[..., :-1],
    )


@pytest.mark.slow
def test_the_parity_check_names_an_engine_that_attends_to_other_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is right, and the trainer's indexer is what is wrong with it in turn."""
    model_dir = write_model("deepseek_v32", tmp_path / "model")
    lens_N = (90, 70, 80)
    generator = torch.Generator().manual_seed(0)
    ids_T = torch.randint(3, VOCAB, (sum(lens_N),), generator=generator)
    batch = TrainBatch(ids_T, torch.ones(len(ids_T), dtype=torch.bool), lens_N)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    differences = {}
    with EngineProcess(EngineSpec(str(model_dir), str(tmp_path / "engine.log"))) as engine:
        engine.wait_healthy()
        for version, plant in enumerate(
            (None, turn_neighbors, keep_negative_products, choose_one_key_less)
        ):
            with monkeypatch.context() as planted:
                if plant is not None:
                    plant(planted)
                check = make_parity_check(TransformersTrainer(model), timeout_s=60.0)
                check.score_sequences(WeightVersion(version), batch)
                report = asyncio.run(check.check([engine.url]))
            name = plant.__name__ if plant else "right"
            differences[name] = report.differences[engine.url].mean
            assert bool(report.failed) == (plant is not None), (name, differences)
    print(differences)
    assert differences["right"] < TOLERANCE


def make_prompts() -> list[list[int]]:
    """Return prompts: one begins as another, and some have fewer tokens than are chosen."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        for length in (5, 40, 17, 90, 1, 64)
    ]
    return [*prompts, prompts[3][:70] + prompts[1]]


def generate(url: str, token_ids: list[int], reports: bool) -> dict[str, Any]:
    body = {
        "input_ids": token_ids,
        "sampling_params": {"max_new_tokens": RESPONSE_LEN, "ignore_eos": True},
        "return_logprob": True,
        "return_indexer_topk": reports,
    }
    answer = requests.post(f"{url}/generate", json=body, timeout=120)
    answer.raise_for_status()
    return answer.json()
