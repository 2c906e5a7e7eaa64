"""Writes what a rehearsal reads: a tiny model, prompts, and an index for a small search.

The prompts are arithmetic, or questions about pictures.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_rl.config import SandboxConfig, SearchConfig
from mcore_rl.process.disk import write_whole
from mcore_rl.services.search.build import build_index
from mcore_rl.services.search.layout import IndexOptions
from mcore_rl.tasks.arithmetic import prepare_arithmetic
from mcore_rl.tasks.shapes import prepare_shapes, vocabulary
from mcore_rl.tasks.tiny_models import (
    IMAGE_END,
    IMAGE_START,
    IMAGE_TOKENS,
    PLACEHOLDER,
    PROCESSOR,
    SPECIAL_TOKENS,
)
from mcore_rl.weights.hf.config import with_text_settings
from mcore_rl.weights.models import family_of, refuse_unsupported
from mcore_rl.weights.models.tower import PLACEHOLDERS, read_vision_settings

TINY_TOWER: Mapping[str, Any] = {
    "depth": 2,
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_heads": 2,
    "num_attention_heads": 2,
    "fullatt_block_indexes": [1],
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 1],
    "mm_hidden_size": 48,
}
"""Replacements for sizes in vision_config, whose keys may begin with vt_; keys that the tower lacks
are not added."""
SPREAD = 0.08
"""Standard deviation of random weights. With 0.02 the embeddings of GLM-4.5V's images are so small
that the epsilons of norms count.
"""
QWEN3 = {
    **PROCESSOR,
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 16,
    "size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 64 * 32 * 32},
}
PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3VLForConditionalGeneration": QWEN3,
    "Qwen3VLMoeForConditionalGeneration": QWEN3,
    "Qwen3_5ForConditionalGeneration": QWEN3,
    "Qwen3_5MoeForConditionalGeneration": QWEN3,
    "Glm4vMoeForConditionalGeneration": {
        **PROCESSOR,
        "processor_class": "Glm4vProcessor",
        "image_processor_type": "Glm4vImageProcessor",
    },
    "KimiVLForConditionalGeneration": {
        "image_processor_type": "KimiVLImageProcessor",
        "in_token_limit": 4 * 64,
        "patch_size": 14,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "pad_input": True,
        "merge_kernel_size": [2, 2],
    },
    "KimiK25ForConditionalGeneration": {
        "media_proc_cfg": {
            "in_patch_limit": 4 * 64,
            "patch_size": 14,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "merge_kernel_size": 2,
        },
    },
}
"""Architecture -> its preprocessor_config.json, if it differs from the one of Qwen2.5-VL."""
ROPE = ("rope_parameters", "rope_scaling")
_PASSAGES = tuple(f"passage {i}\nthe number {i} follows {i - 1} ." for i in range(1, 101))


def write_inputs(tiny: Mapping[str, Any], folder: Path) -> Path:
    """Write prompts, tokenizer and config.json of a tiny model; return the folder."""
    if family_of(tiny).has_tower:
        tiny = write_image_inputs(tiny, folder)
    else:
        prepare_arithmetic(folder)
    path = folder / "model" / "config.json"
    refuse_unsupported(with_text_settings(tiny), path)
    write_whole(path, json.dumps(tiny, indent=2) + "\n")
    return folder


def with_tiny_sections(tiny: Mapping[str, Any], section: list[int]) -> dict[str, Any]:
    """Return a tiny model's config.json, whose heads are split as `section` splits larger heads.

    Each of the three axes keeps its share of the rotated part.
    """
    family = family_of(tiny)
    half = int(tiny_head(tiny) * family.rotary_share(tiny)) // 2
    others = [max(1, half * part // sum(section)) for part in section[1:]]
    sizes = [half - sum(others), *others]
    return {
        **tiny,
        **{key: {**tiny[key], "mrope_section": sizes} for key in ROPE if tiny.get(key)},
    }


def tiny_head(config: Mapping[str, Any]) -> int:
    """Return the dimension of an attention head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def write_image_inputs(tiny: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write prompts with pictures, and the tokenizer and image processor of a tiny model.

    Returns its config.json, from `tiny` with settings of the language model at the top.
    """
    prepare_shapes(folder)
    processor = PROCESSORS.get(family_of(tiny).architecture, PROCESSOR)
    path = folder / "model" / "preprocessor_config.json"
    write_whole(path, json.dumps(processor, indent=2) + "\n")
    return nest_text_config(tiny, [*SPECIAL_TOKENS, *IMAGE_TOKENS, *vocabulary()])


def nest_text_config(tiny: Mapping[str, Any], words: list[str]) -> dict[str, Any]:
    """Return config.json with the language model's settings in text_config, where towers read them.

    words   the vocabulary of the tokenizer
    """
    text = {
        key: value for key, value in tiny.items() if key not in ("text_config", "architectures")
    }
    text |= {
        "model_type": (tiny.get("text_config") or {}).get(
            "model_type", f"{tiny['model_type']}_text"
        ),
        "vocab_size": len(words),
    }
    vision = read_vision_settings(tiny)
    tower = {
        key: TINY_TOWER.get(key.removeprefix("vt_"), value) if value else value
        for key, value in vision.items()
    }
    for key in ("out_hidden_size", "text_hidden_size"):
        if key in vision:
            tower[key] = tiny["hidden_size"]
    tower["initializer_range"] = SPREAD
    text["initializer_range"] = SPREAD
    of_text = {key: text.pop(key) for key in list(text) if _is_of_images(key)}
    ids = {key: words.index(_select_token(key)) for key in of_text if key.endswith("_token_id")}
    return {
        "architectures": list(tiny["architectures"]),
        "model_type": tiny["model_type"],
        "text_config": text,
        "vision_config": tower,
        "tie_word_embeddings": tiny.get("tie_word_embeddings", False),
        "eos_token_id": tiny["eos_token_id"],
        "dtype": "float32",
        **ids,
    }


def _is_of_images(key: str) -> bool:
    return key in PLACEHOLDERS or key.startswith(("image_", "video_", "vision_"))


def _select_token(key: str) -> str:
    """Return the token that a key of config.json names; padding for the tokens of videos."""
    if key in PLACEHOLDERS:
        return PLACEHOLDER
    if key.startswith("video_") or key == "vision_token_id":
        return SPECIAL_TOKENS[0]
    return IMAGE_START if "start" in key else IMAGE_END


def smallest_servers(
    sandbox: SandboxConfig, search: SearchConfig, folder: Path
) -> dict[str, SandboxConfig | SearchConfig]:
    """Return the groups `sandbox` and `search` of a rehearsal; an index is written to `folder`."""
    if sandbox.is_used:
        sessions = min(sandbox.max_sessions, 1)
        sandbox = replace(sandbox, workers=1, max_sessions=sessions)
    if search.is_used:
        search = replace(search, index=str(_write_index(folder)), method="bm25", threads=1)
    return {"sandbox": sandbox, "search": search}


def _write_index(folder: Path) -> Path:
    """Write a small corpus and its index; return the index."""
    corpus = folder / "passages.jsonl"
    rows = (json.dumps({"id": i, "contents": text}) for i, text in enumerate(_PASSAGES))
    text = "".join(f"{row}\n" for row in rows)
    if not corpus.exists() or corpus.read_text() != text:
        write_whole(corpus, text)
    build_index(corpus, folder / "index", IndexOptions(), None)
    return folder / "index"
