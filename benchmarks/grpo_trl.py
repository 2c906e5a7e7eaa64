"""Trains with TRL's GRPOTrainer; prints a JSON line with the seconds and tokens of each step."""

import argparse
import json
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_reward import reward
from grpo_workload import BY_NAME, LEARNING_RATE, Workload


class StepClock(TrainerCallback):
    """Measures seconds from the end of one optimizer step to the end of the next.

    They cover generation, rewards and update.
    """

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.ends)]


def make_config(workload: Workload, folder: Path, num_steps: int, micro_batch: int) -> GRPOConfig:
    samples = workload.num_samples // count_processes()
    assert samples % micro_batch == 0, f"{samples} / {micro_batch}"
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=num_steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=samples // micro_batch,
        generation_batch_size=workload.num_samples,
        num_generations=workload.samples_per_prompt,
        max_completion_length=workload.max_len,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        use_cpu=True,
        ddp_backend="gloo" if count_processes() > 1 else None,
        ddp_find_unused_parameters=True,  # experts that got no token
        bf16=False,
        dataloader_pin_memory=False,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )


def count_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=tuple(BY_NAME), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    args = parser.parse_args()
    workload = BY_NAME[args.workload]
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32)
    clock, score = StepClock(), Scorer()
    rows = Dataset.from_parquet(str(args.folder / "train.parquet")).select_columns(["prompt"])
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=make_config(workload, args.folder, args.steps, args.micro_batch),
        train_dataset=rows,
        callbacks=[clock],
    )
    trainer.train()
    assert len(score.tokens) == args.steps, f"{len(score.tokens)} rewards in {args.steps} steps"
    tokens = torch.tensor(score.tokens[1:])
    if count_processes() > 1:
        torch.distributed.all_reduce(tokens)
        torch.distributed.destroy_process_group()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"seconds": clock.seconds(), "tokens": tokens.tolist()}), flush=True)
    if count_processes() > 1:
        os._exit(0)  # a rank of two once hung for nine minutes in threads of gloo that end with it


if __name__ == "__main__":
    main()
