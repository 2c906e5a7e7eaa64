"""The tiny Qwen3-MoE and the word tokenizer of the recipes that learn on a laptop.

One word or number is one token, so a response of a few steps has about a dozen tokens.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_rl.process.disk import reporting_full_disk, write_whole

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ ('<|user|> ' if m['role'] == 'user' else '<|assistant|> ') + m['content'] }}"
    "{{ ' ' if m['role'] == 'user' else ' <|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_vocabulary(max_number: int, words: set[str]) -> list[str]:
    """Return special tokens, the numbers 0 to `max_number` and `words`, sorted; a token's id is its
    index.
    """
    return [*SPECIAL_TOKENS, *map(str, range(max_number + 1)), *sorted(words)]


def make_word_tokenizer(
    vocabulary: Sequence[str], chat_template: str = CHAT_TEMPLATE, roles: Sequence[str] = ()
) -> Any:
    """Return a tokenizer with one token per word and per number.

    `roles`: special tokens that begin messages, besides those of user and assistant.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: i for i, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<|pad|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>", *roles],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    return fast


def qwen3_moe_config(vocab_size: int, **sizes: Any) -> dict[str, Any]:
    """Return config.json of a Qwen3-MoE.

    By default it has about one million parameters: 4 layers, 8 experts (2 active), 4 query heads.
    `sizes` replaces or adds entries by their names in config.json.
    """
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "router_aux_loss_coef": 0.001,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index("<|end|>"),
        "pad_token_id": SPECIAL_TOKENS.index("<|pad|>"),
        "torch_dtype": "float32",
        **sizes,
    }


def write_tiny_model(
    folder: Path,
    vocabulary: Sequence[str],
    chat_template: str = CHAT_TEMPLATE,
    roles: Sequence[str] = (),
    **sizes: Any,
) -> None:
    """Write config.json and the tokenizer; weights are drawn by `model.init=random`.

    `sizes` replaces or adds entries of config.json, see qwen3_moe_config.
    """
    config = qwen3_moe_config(len(vocabulary), **sizes)
    write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")
    with reporting_full_disk(folder):
        make_word_tokenizer(vocabulary, chat_template, roles).save_pretrained(folder)
