"""The workloads of benchmarks/grpo_step.py and gpu_grpo.py: sizes alone, this imports nothing."""

from dataclasses import dataclass
from typing import Any

LEARNING_RATE = 1e-6
MAX_PROMPT_LEN = 256
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
}
MEDIUM: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
}
LARGE: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 4096,
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 8,
}
"""The mixture of experts of the GPU checks."""
DENSE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
}
"""Qwen3-0.6B with a head of its own."""
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Workload:
    """Model and samples of a GRPO step.

    shape      sizes of a model of random weights, with experts if it names their size; None:
               SmolLM2-135M-Instruct
    max_len    most tokens of a response
    mean_len   mean length that the random model's chance of ending would give if `max_len` did not
               cut; None: every response has `max_len`, or ends where SmolLM2 ends it
    processes  engines and trainer ranks of this system that are fastest here: one of each with all
               threads, or one of each per core where Python takes longer than matrix products
    """

    name: str
    shape: dict[str, Any] | None
    num_prompts: int
    samples_per_prompt: int
    max_len: int
    mean_len: float | None = None
    processes: int = 1

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.samples_per_prompt

    @property
    def has_experts(self) -> bool:
        return self.shape is not None and "moe_intermediate_size" in self.shape


WORKLOADS = (
    Workload("1M-32x64", SMALL, 4, 8, 64),
    Workload("1M-256x256", SMALL, 32, 8, 256, mean_len=128, processes=2),
    Workload("55M-64x128", MEDIUM, 8, 8, 128, mean_len=64),
    Workload("SmolLM2-32x128", None, 4, 8, 128),
)
GPU_WORKLOADS = (
    Workload("1.4B-128x512", LARGE, 16, 8, 512, mean_len=512),
    Workload("0.8B-128x512", DENSE, 16, 8, 512, mean_len=512),
)
BY_NAME = {workload.name: workload for workload in (*WORKLOADS, *GPU_WORKLOADS)}
