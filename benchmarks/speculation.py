"""Measures the CPU time of a token in engines that guess where that is faster, and in others.

    python benchmarks/speculation.py [--requests 8] [--tokens 400] [--rounds 4] [--guesses 2]
                                     [--hidden 64]

Engines of a GLM-4.5 with ten small layers take turns with the same greedy requests: one that never
guesses, and two that guess with a layer for multi-token prediction, by measured speed. One layer is
random, the other knows each next token, as the models are made so that it depends on the last one
alone. The first round, in which engines measure, is told apart. CPU time is that of the busiest
process of an engine, the scheduler, which runs SGLang's layers in torch in all three. The last line
is JSON: how many times as fast as the first engine the others are.
"""

import argparse
import json
import statistics
import tempfile
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from cpu_time import read_by_process
from mcore_rl.rollout.drafts import read_counts, sum_counts
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.speculation import make_speculation
from mcore_rl.weights.hf.config import read_hf_config, with_trained_mtp
from mcore_rl.weights.models import hf_tensor_shapes

DEADLINE_S = 600.0
LAYERS = 10
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": LAYERS - 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "eos_token_id": 1,
}
WIDTHS = ("hidden_size", "head_dim", "intermediate_size", "moe_intermediate_size")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400, help="new tokens of each request")
    parser.add_argument("--rounds", type=int, default=4, help="beside the one of measuring")
    parser.add_argument("--guesses", type=int, default=2, help="rollout.speculate_tokens")
    parser.add_argument("--hidden", type=int, default=64, help="hidden size; others grow with it")
    args = parser.parse_args()
    num_tokens = args.requests * args.tokens
    with tempfile.TemporaryDirectory(prefix="speculation_") as name, ExitStack() as stack:
        engines = start_engines(Path(name), stack, args.guesses, args.hidden)
        times: dict[str, list[float]] = {way: [] for way in engines}
        for _ in range(args.rounds + 1):
            answers = {}
            for way, engine in engines.items():
                before = read_by_process(engine.pid)
                answers[way] = generate(engine.url, args.requests, args.tokens)
                after = read_by_process(engine.pid)
                busiest = max(after[pid] - before.get(pid, 0.0) for pid in after)
                times[way].append(1e6 * busiest / num_tokens)
                print(way, round(times[way][-1]), "us a token", describe(answers[way]), flush=True)
            tokens = [[answer["output_ids"] for answer in each] for each in answers.values()]
            assert tokens[0] == tokens[1] == tokens[2], "the engines drew other tokens"
    report(times)


def report(times: dict[str, list[float]]) -> None:
    """Print how many times as fast as the engine that never guesses the others are."""
    plain = times["never"]
    ratios = {way: [p / t for p, t in zip(plain, times[way], strict=True)] for way in times}
    figures = {
        f"{way}_{part}": round(statistics.median(values), 3)
        for way in ("random", "knowing")
        for part, values in (("measuring", ratios[way][:1]), ("afterwards", ratios[way][1:]))
    }
    print(json.dumps({"never_us_per_token": round(statistics.median(plain[1:])), **figures}))


def start_engines(
    folder: Path, stack: ExitStack, guesses: int, hidden: int
) -> dict[str, EngineProcess]:
    """Return a running engine for each way to guess."""
    write_models(folder, hidden)
    engines = {}
    for way, model, method in (
        ("never", "random", "none"),
        ("random", "random", "mtp"),
        ("knowing", "knowing", "mtp"),
    ):
        spec = EngineSpec(
            *(str(folder / model), str(folder / f"{way}.log")),
            compiled=False,
            speculation=make_speculation(method, guesses, "faster"),
        )
        engines[way] = stack.enter_context(EngineProcess(spec))
    return engines


def write_models(folder: Path, hidden: int) -> None:
    """Save two models that differ in the layer for multi-token prediction alone."""
    torch.manual_seed(0)
    widths = {name: SIZES[name] * hidden // SIZES["hidden_size"] for name in WIDTHS}
    policy = Glm4MoeForCausalLM(Glm4MoeConfig(**SIZES | widths)).float()
    for way in ("random", "knowing"):
        policy.save_pretrained(folder / way)
        tensors = load_file(folder / way / "model.safetensors")
        generator = torch.Generator().manual_seed(1)
        shapes = hf_tensor_shapes(with_trained_mtp(read_hf_config(folder / way)))
        made = {name: draw(name, shape, generator) for name, shape in shapes.items()}
        if way == "knowing":  # it reads the embedding of the last token, and no hidden state
            project = made[f"model.layers.{LAYERS}.eh_proj.weight"]
            project.zero_()[:, : len(project)].fill_diagonal_(1.0)
        tensors |= made
        save_file(tensors, folder / way / "model.safetensors", metadata={"format": "pt"})


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return a tensor of a model in which attention and MLPs add nothing to an embedding."""
    if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj", "bias")):
        return torch.zeros(shape)
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    return 0.3 * torch.randn(shape, generator=generator)


def generate(url: str, num_requests: int, num_tokens: int) -> list[dict[str, Any]]:
    """Return the engine's answers to requests of one token each."""
    body = {
        "input_ids": [[7 * i % 90 + 2] for i in range(num_requests)],
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": num_tokens,
            "ignore_eos": True,
        },
        "return_logprob": True,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        return json.load(response)


def describe(answers: list[dict[str, Any]]) -> str:
    """Return what the engine says of its passes."""
    counts = sum_counts(*(read_counts(answer["meta_info"]) for answer in answers))
    return "".join(f"{count}" for count in counts.values())


if __name__ == "__main__":
    main()
