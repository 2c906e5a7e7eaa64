"""Measures the CPU time of an engine's decode step with compiled code and without it.

    python benchmarks/decode_step.py [--requests 32] [--tokens 64] [--rounds 5]

Two engines of the model of grpo_step.py take turns with the same requests; the tokens must be the
same. CPU time is that of the busiest process of an engine, the scheduler. The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from cpu_time import read_by_process
from grpo_workload import EXPERTS, SMALL
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec

PROMPT_LEN = 16
DEADLINE_S = 300.0
WAYS = {"torch": False, "compiled": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--rounds", type=int, default=5, help="beside one of warm-up")
    args = parser.parse_args()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="decode_step_") as name, ExitStack() as stack:
        engines = start_engines(Path(name), stack)
        for index in range(args.rounds + 1):
            answers = []
            for way, engine in engines.items():
                before = read_by_process(engine.pid)
                answers.append(generate(engine.url, args.requests, args.tokens, index))
                after = read_by_process(engine.pid)
                busiest = max(after[pid] - before.get(pid, 0.0) for pid in after)
                times[way].append(1000 * busiest / args.tokens)
            assert answers[0] == answers[1], "the engines sampled other tokens"
    medians = {way: statistics.median(values[1:]) for way, values in times.items()}
    figures = {f"{way}_ms_per_step": round(value, 2) for way, value in medians.items()}
    print(json.dumps({**figures, "ratio": round(medians["torch"] / medians["compiled"], 2)}))


def start_engines(folder: Path, stack: ExitStack) -> dict[str, EngineProcess]:
    """Return a running engine for each of WAYS."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=128, eos_token_id=1, pad_token_id=2, **SMALL, **EXPERTS)
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder / "model")
    engines = {}
    for way, compiled in WAYS.items():
        log = folder / f"{way}.log"
        spec = EngineSpec(str(folder / "model"), str(log), deterministic=True, compiled=compiled)
        engines[way] = stack.enter_context(EngineProcess(spec))
        is_compiled = "the forward pass runs in compiled code" in log.read_text()
        assert is_compiled == compiled, f"compiled={compiled}: see the log\n{log.read_text()}"
    return engines


def generate(url: str, num_requests: int, num_tokens: int, index: int) -> list[list[int]]:
    """Return the tokens of `num_requests` seeded responses to prompts of this round."""
    settings = {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {
        "input_ids": [
            [(7 * i + j + index) % 100 + 10 for j in range(PROMPT_LEN)] for i in range(num_requests)
        ],
        "sampling_params": [
            {**settings, "sampling_seed": index * num_requests + i} for i in range(num_requests)
        ],
        "return_logprob": True,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        return [answer["output_ids"] for answer in json.load(response)]


if __name__ == "__main__":
    main()
