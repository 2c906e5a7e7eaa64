"""Compiled decoding of engines on a CPU has the log-probs of transformers."""

import json
import shutil
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MIXTURE = {"moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 3}
FAMILIES = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2, with biases": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "qwen3_moe": (Qwen3MoeConfig, {**MIXTURE, "head_dim": 10, "norm_topk_prob": True}),
    "qwen3_moe, plain weights": (Qwen3MoeConfig, {**MIXTURE, "norm_topk_prob": False}),
}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.06}
"""Sizes at which each part of a prompt's forward pass is worth a second thread."""
PROMPTS = [[5, 9, 77, 30], list(range(3, 60)), [100], [5, 9, 77, 30, 8, 8, 120]]
LONG_PROMPTS = [[*range(3, 127), *range(126, 2, -1)], *PROMPTS]
NUM_NEW = 40


def save_model(family: str, folder: Path, sizes: Mapping[str, Any] = {}) -> PreTrainedModel:
    torch.manual_seed(0)
    config_cls, changes = FAMILIES[family]
    config = config_cls(**{**SIZES, **changes, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():  # zeros and ones would hide an omission
        if name.endswith("bias") or "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model.eval()


def generate(
    url: str, prompts: Sequence[list[int]] = PROMPTS, logprob_start_len: int = 0
) -> list[dict[str, Any]]:
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": NUM_NEW, "ignore_eos": True, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": logprob_start_len,
    }
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


@torch.no_grad()
def largest_difference(
    model: PreTrainedModel,
    answers: list[dict[str, Any]],
    prompts: Sequence[list[int]] = PROMPTS,
) -> float:
    """Return by how much the log-probs in `answers` differ from the model's own."""
    largest = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        meta = answer["meta_info"]
        entries = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
        tokens = torch.tensor([*prompt, *answer["output_ids"]])
        assert [entry[1] for entry in entries] == tokens[-len(entries) :].tolist()
        logprobs = torch.log_softmax(model(tokens[None]).logits[0, :-1].double(), -1)
        expected = logprobs.gather(1, tokens[1:, None])[-len(entries) :, 0]
        actual = torch.tensor([entry[0] for entry in entries], dtype=torch.float64)
        largest = max(largest, (actual - expected).abs().max().item())
    return largest


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "qwen3_moe")) for name in FAMILIES],
)
def test_logprobs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = save_model(family, tmp_path / "model")
    log = tmp_path / "engine.log"
    with EngineProcess(EngineSpec(str(tmp_path / "model"), str(log), deterministic=True)) as engine:
        answers = generate(engine.url)
        again = generate(engine.url)  # with the prompts in the prefix cache
    assert "the forward pass runs in compiled code" in log.read_text()
    assert largest_difference(model, answers) < 1e-5
    assert largest_difference(model, again) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2, with biases", "qwen3_moe"])
def test_two_threads_have_the_same_logprobs(family: str, tmp_path: Path, monkeypatch) -> None:
    model = save_model(family, tmp_path / "model", {**WIDE, "moe_intermediate_size": 208})
    log = tmp_path / "engine.log"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with EngineProcess(EngineSpec(str(tmp_path / "model"), str(log), deterministic=True)) as engine:
        answers = generate(engine.url, LONG_PROMPTS)
    assert "the forward pass runs in compiled code on 2 threads" in log.read_text()
    assert largest_difference(model, answers, LONG_PROMPTS) < 1e-5


@pytest.mark.slow
def test_layers_run_in_torch_where_that_is_asked_for(tmp_path: Path) -> None:
    model = save_model("qwen3_moe", tmp_path / "model")
    log = tmp_path / "engine.log"
    spec = EngineSpec(str(tmp_path / "model"), str(log), deterministic=True, compiled=False)
    with EngineProcess(spec) as engine:
        answers = generate(engine.url)
    assert "no C compiler: decoding runs in torch" in log.read_text()
    assert largest_difference(model, answers) < 1e-5
