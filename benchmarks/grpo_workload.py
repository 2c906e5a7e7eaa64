"""Makes the workloads of benchmarks/grpo_step.py: prompts, a tokenizer and a model."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3MoeConfig, Qwen3MoeForCausalLM

from mcore_rl.tasks.arithmetic import prepare_arithmetic

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

    shape      sizes of a mixture of experts of random weights; None: SmolLM2-135M-Instruct
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


WORKLOADS = (
    Workload("1M-32x64", SMALL, 4, 8, 64),
    Workload("1M-256x256", SMALL, 32, 8, 256, mean_len=128, processes=2),
    Workload("55M-64x128", MEDIUM, 8, 8, 128, mean_len=64),
    Workload("SmolLM2-32x128", None, 4, 8, 128),
)
BY_NAME = {workload.name: workload for workload in WORKLOADS}


def make_workload(workload: Workload, folder: Path) -> None:
    """Write train.parquet and model/ (tokenizer, config.json, float32 weights) to `folder`."""
    prepare_arithmetic(folder, seed=0)
    if workload.shape is None:
        from smollm2 import write_smollm2

        shutil.rmtree(folder / "model")
        write_smollm2(folder / "model")
        return
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    make_model(workload, tokenizer).save_pretrained(folder / "model")


def make_model(workload: Workload, tokenizer: PreTrainedTokenizerBase) -> Qwen3MoeForCausalLM:
    """Return a model of random float32 weights that ends its responses as `workload` says."""
    torch.manual_seed(0)
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    assert isinstance(eos, int) and isinstance(pad, int), f"eos {eos}, pad {pad}"
    sizes = (workload.shape or {}) | EXPERTS
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), eos_token_id=eos, pad_token_id=pad, **sizes)
    model = Qwen3MoeForCausalLM(config).float()
    chance = 0.0 if workload.mean_len is None else 1 / workload.mean_len
    _set_chance(model, eos, chance)
    return model


@torch.no_grad()
def _set_chance(model: Qwen3MoeForCausalLM, token_id: int, chance: float) -> None:
    """Have the model sample a token with about this probability, whatever came before it.

    Residual coordinate 0 becomes a constant, and only the output row of `token_id` looks at it.
    """
    for name, weight in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            weight[:, 0] = 1.0
        elif name.endswith("o_proj.weight"):
            weight[0] = 0.0
        elif name.endswith("experts.down_proj"):
            weight[:, 0] = 0.0
        elif name.endswith("lm_head.weight"):
            weight[:, 0] = 0.0
            weight[token_id] = 0.0
    row = model.lm_head.weight[token_id]
    context = torch.arange(model.config.vocab_size)[None]
    low, high = -10.0, 10.0
    for _ in range(40):
        row[0] = (low + high) / 2
        probability = model(context).logits.softmax(-1)[..., token_id].mean()
        low, high = (low, row[0].item()) if probability > chance else (row[0].item(), high)
