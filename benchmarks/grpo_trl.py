"""Trains with TRL's GRPOTrainer and prints a JSON line with its seconds per step."""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen3MoeForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_workload import LEARNING_RATE, NUM_PROMPTS, RESPONSE_LEN, SAMPLES_PER_PROMPT, reward


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


def make_config(folder: Path, num_steps: int) -> GRPOConfig:
    num_samples = NUM_PROMPTS * SAMPLES_PER_PROMPT
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=num_steps,
        per_device_train_batch_size=num_samples,
        generation_batch_size=num_samples,
        num_generations=SAMPLES_PER_PROMPT,
        max_completion_length=RESPONSE_LEN,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )


def score(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    texts = [messages[-1]["content"] for messages in completions]
    return [
        reward(data_source="", solution_str=text, ground_truth=None, extra_info=None)
        for text in texts
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = Qwen3MoeForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32)
    clock = StepClock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=make_config(args.folder, args.steps),
        train_dataset=Dataset.from_parquet(str(args.folder / "train.parquet")).select_columns(
            ["prompt"]
        ),
        callbacks=[clock],
    )
    trainer.train()
    lens = [
        row["completions/mean_length"]
        for row in trainer.state.log_history
        if "completions/mean_length" in row
    ]
    print(json.dumps({"seconds": clock.seconds(), "response_len": min(lens)}))


if __name__ == "__main__":
    main()
