"""Trains with TRL's GRPOTrainer; prints a JSON line with seconds, tokens and phases of each step.

It needs torch and TRL alone, in whatever Python runs it. With --versions it only says, as JSON,
what it would run with; its exit status is 1 where --device cuda has no GPU.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_options import WAYS, list_trl
from grpo_reward import reward
from grpo_workload import BY_NAME

PACKAGES = ("trl", "torch", "transformers", "accelerate", "datasets")


class StepClock(TrainerCallback):
    """Measures seconds from the end of one optimizer step to the end of the next.

    They cover generation, rewards and update.
    """

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        wait_for_device()
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.ends)]


class TimedTrainer(GRPOTrainer):
    """Measures seconds of each step's sampling and of its rewards."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.rollouts: list[float] = []
        self.rewards: list[float] = []
        super().__init__(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        answer = super()._generate(*args, **kwargs)
        wait_for_device()
        self.rollouts.append(time.perf_counter() - began)
        return answer

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        answer = super()._calculate_rewards(*args, **kwargs)
        self.rewards.append(time.perf_counter() - began)
        return answer


class Scorer:
    """The reward, which also counts the tokens of each step's responses in this process."""

    __name__ = "score"

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(
        self,
        completions: list[list[dict[str, str]]],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> list[float]:
        self.tokens.append(sum(map(len, completion_ids)))
        texts = [messages[-1]["content"] for messages in completions]
        return [
            reward(data_source="", solution_str=text, ground_truth=None, extra_info=None)
            for text in texts
        ]


def wait_for_device() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def count_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all steps but the first; tokens are those of this process."""
    on_gpu = args.device == "cuda"
    options = list_trl(
        BY_NAME[args.workload],
        args.folder,
        args.steps,
        args.micro_batch,
        processes=count_processes(),
        on_gpu=on_gpu,
        way=args.way,
    )
    dtype = torch.float32 if args.way == "padded" or not on_gpu else torch.bfloat16
    clock, score = StepClock(), Scorer()
    rows = Dataset.from_parquet(str(args.folder / "train.parquet")).select_columns(["prompt"])
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=dtype),
        reward_funcs=score,
        args=GRPOConfig(**options),
        train_dataset=rows,
        callbacks=[clock],
    )
    trainer.train()
    for name, counted in (("rewards", score.tokens), ("samplings", trainer.rollouts)):
        assert len(counted) == args.steps, f"{len(counted)} {name} in {args.steps} steps"
    seconds = clock.seconds()
    phases = {"rollout": trainer.rollouts[1:], "reward": trainer.rewards[1:]}
    rest = [step - sum(parts) for step, *parts in zip(seconds, *phases.values(), strict=True)]
    return {"seconds": seconds, "tokens": score.tokens[1:], "phases": {**phases, "train": rest}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", action="store_true")
    parser.add_argument("--workload", choices=tuple(BY_NAME))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--way", choices=tuple(WAYS), default="padded", help="of sampling")
    args = parser.parse_args()
    if args.versions:
        if args.device == "cuda" and not torch.accelerator.is_available():
            raise SystemExit(f"torch {torch.__version__} finds no GPU")
        print(json.dumps({name: version(name) for name in PACKAGES}))
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    figures = train(args)
    if count_processes() > 1:
        tokens = torch.tensor(figures["tokens"])
        torch.distributed.all_reduce(tokens)
        torch.distributed.destroy_process_group()
        figures["tokens"] = tokens.tolist()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(figures), flush=True)
    if count_processes() > 1:
        os._exit(0)  # a rank of two once hung for nine minutes in threads of gloo that end with it


if __name__ == "__main__":
    main()
