"""Makes the workloads of benchmarks/grpo_step.py and gpu_grpo.py: prompts, tokenizer, a model."""

import shutil
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grpo_workload import EXPERTS, Workload
from mcore_rl.device import device, has_cuda
from mcore_rl.tasks.arithmetic import prepare_arithmetic

RandomModel = Qwen3MoeForCausalLM | Qwen3ForCausalLM
NEVER = -10.0
"""Weight of a constant in the output row of a token that is never sampled."""


def make_workload(workload: Workload, folder: Path) -> None:
    """Write train.parquet and model/ (tokenizer, config.json, weights) to `folder`.

    Weights are in bfloat16 if there is a GPU, which also draws them, otherwise in float32.
    """
    prepare_arithmetic(folder, seed=0)
    if workload.shape is None:
        from smollm2 import write_smollm2

        shutil.rmtree(folder / "model")
        write_smollm2(folder / "model")
        return
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = make_model(workload, tokenizer)
    if has_cuda():
        model = model.bfloat16()
    model.save_pretrained(folder / "model")


def make_model(workload: Workload, tokenizer: PreTrainedTokenizerBase) -> RandomModel:
    """Return a model of random float32 weights that ends its responses as `workload` says.

    It samples tokens of the tokenizer alone, however many its vocabulary has.
    """
    torch.manual_seed(0)
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    assert isinstance(eos, int) and isinstance(pad, int), f"eos {eos}, pad {pad}"
    sizes = {
        "vocab_size": len(tokenizer),
        "eos_token_id": eos,
        "pad_token_id": pad,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        **(EXPERTS if workload.has_experts else {}),
        **(workload.shape or {}),
    }
    with device():
        if workload.has_experts:
            model: RandomModel = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    model = model.float()
    chance = 0.0 if workload.mean_len is None else 1 / workload.mean_len
    _set_chance(model, eos, len(tokenizer), chance)
    return model


@torch.no_grad()
def _set_chance(model: RandomModel, token_id: int, num_tokens: int, chance: float) -> None:
    """Have the model sample a token with about this probability, whatever came before it, and none
    from `num_tokens` on.

    Residual coordinate 0 becomes a constant, and only the output rows of these tokens look at it.
    """
    for name, weight in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            weight[:, 0] = 1.0
        elif name.endswith(("o_proj.weight", "mlp.down_proj.weight")):
            weight[0] = 0.0
        elif name.endswith("experts.down_proj"):
            weight[:, 0] = 0.0
        elif name.endswith("lm_head.weight"):
            weight[:, 0] = 0.0
            weight[token_id] = 0.0
            weight[num_tokens:, 0] = NEVER
    row = model.lm_head.weight[token_id]
    context = torch.arange(num_tokens, device=row.device)[None]
    low, high = -10.0, 10.0
    for _ in range(40):
        row[0] = (low + high) / 2
        probability = model(context).logits.softmax(-1)[..., token_id].mean()
        low, high = (low, row[0].item()) if probability > chance else (row[0].item(), high)
