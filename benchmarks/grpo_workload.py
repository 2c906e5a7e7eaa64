"""Makes prompts, a tokenizer, an MoE of 1 M parameters and a reward for both systems."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3MoeConfig, Qwen3MoeForCausalLM

from mcore_rl.data.arithmetic import prepare_arithmetic

NUM_PROMPTS, SAMPLES_PER_PROMPT, RESPONSE_LEN = 4, 8, 64
TOKENS_PER_STEP = NUM_PROMPTS * SAMPLES_PER_PROMPT * RESPONSE_LEN
LEARNING_RATE = 1e-6
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


def make_workload(folder: Path) -> None:
    """Write train.parquet and model/ (tokenizer, config.json, float32 weights) to `folder`."""
    prepare_arithmetic(folder, seed=0)
    model = make_model(AutoTokenizer.from_pretrained(folder / "model"))
    model.save_pretrained(folder / "model")


def make_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3MoeForCausalLM:
    """Return a model of random float32 weights that never samples the end of a sequence."""
    torch.manual_seed(0)
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    assert isinstance(eos, int) and isinstance(pad, int), f"eos {eos}, pad {pad}"
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), eos_token_id=eos, pad_token_id=pad, **SHAPE)
    model = Qwen3MoeForCausalLM(config).float()
    _never_sample(model, eos)
    return model


@torch.no_grad()
def _never_sample(model: Qwen3MoeForCausalLM, token_id: int) -> None:
    """Keep a token from being sampled, so that every response has its full length.

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
            weight[token_id, 0] = -10.0


def reward(*, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Return a cheap score that differs between samples, so that no group's advantages vanish."""
    return len(set(solution_str)) / max(len(solution_str), 1)
