"""Writes the tiny models of recipes that learn on a laptop: Qwen3-MoE, and Qwen2.5-VL for images.

Their tokenizer has one token per word or number, so a response of a few steps has about a dozen.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_rl.process.disk import report_full_disk, write_whole

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ ('<|user|> ' if m['role'] == 'user' else '<|assistant|> ') + m['content'] }}"
    "{{ ' ' if m['role'] == 'user' else ' <|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
IMAGE_START, IMAGE_END, PLACEHOLDER = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
IMAGE_TOKENS = (IMAGE_START, IMAGE_END, PLACEHOLDER)
IMAGE_CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|user|> ' if m['role'] == 'user' else '<|assistant|> ' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ ' ' if m['role'] == 'user' else ' <|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PIXELS_PER_TOKEN = 28 * 28
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 4 * PIXELS_PER_TOKEN, "longest_edge": 64 * PIXELS_PER_TOKEN},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
"""SGLang takes patches of 14 x 14 pixels alone for Qwen2.5-VL."""
VISION = {
    "model_type": "qwen2_5_vl",
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 96,
    "fullatt_block_indexes": [1],
    "initializer_range": 0.05,
}


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
    with report_full_disk(folder):
        make_word_tokenizer(vocabulary, chat_template, roles).save_pretrained(folder)


def write_tiny_vision_model(
    folder: Path,
    words: Sequence[str],
    chat_template: str = IMAGE_CHAT_TEMPLATE,
    roles: Sequence[str] = (),
) -> None:
    """Write config.json, the image processor and a tokenizer with one token per word.

    `roles`: special tokens that begin messages, besides those of user and assistant.

    Weights are drawn by `model.init=random`. There are about 0.5 million: 4 layers, and a tower of
    2 blocks.
    """
    vocabulary = [*SPECIAL_TOKENS, *IMAGE_TOKENS, *roles, *words]
    config = qwen2_5_vl_config(vocabulary)
    write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")
    write_whole(folder / "preprocessor_config.json", json.dumps(PROCESSOR, indent=2) + "\n")
    tokenizer = make_word_tokenizer(vocabulary, chat_template, (*IMAGE_TOKENS, *roles))
    with report_full_disk(folder):
        tokenizer.save_pretrained(folder)


def qwen2_5_vl_config(vocabulary: Sequence[str]) -> dict[str, Any]:
    """Return config.json of a tiny Qwen2.5-VL."""
    end = vocabulary.index("<|end|>")
    text = {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": len(vocabulary),
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 4, 4],
        },
    }
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": VISION,
        "image_token_id": vocabulary.index(PLACEHOLDER),
        "video_token_id": vocabulary.index(SPECIAL_TOKENS[0]),
        "vision_start_token_id": vocabulary.index(IMAGE_START),
        "vision_end_token_id": vocabulary.index(IMAGE_END),
        "eos_token_id": end,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
