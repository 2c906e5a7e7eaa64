"""`mcore-rl-ckpt support` tells known, nearly known and unknown families apart, and what lacks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from checkpoint_tools.cli import main
from checkpoint_tools.support.parts import PARTS
from checkpoint_tools.support.report import Support, find_support
from checkpoint_tools.support.tables import find_nearest, make_pattern
from mcore_rl.weights.models import LANGUAGE
from tests.support.kimi_k25_published import CONFIG
from tests.support.policy import ROOT
from tests.support.quantized_models import FP8
from tests.support.tiny_kimi_k25 import write_int4_kimi_k25_model
from tests.support.tiny_models import MODELS, SIZES, write_model

MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
}
HYBRID: dict[str, Any] = {
    "architectures": ["NoSuchHybridForCausalLM"],
    "vocab_size": 99,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "mamba_d_state": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_latent_size": 32,
    "time_step_limit": [0.0, 1.0],
}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def save_random(folder: Path, class_name: str, **settings: Any) -> Path:
    """Save a random model of a family that has no table."""
    config = getattr(transformers, class_name)(**{**SIZES, "num_hidden_layers": 2, **settings})
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


PUBLISHED = sorted(path.parent.name for path in (ROOT / "recipes/model").glob("*/config.json"))


@pytest.mark.parametrize("folder", PUBLISHED)
def test_models_of_recipes_are_supported(folder: str) -> None:
    support = find_support(ROOT / "recipes/model" / folder / "config.json")
    assert support.is_supported and not support.refusal
    assert support.nearest == support.architecture
    assert not support.missing, "their tables read what the parts' keys say"
    assert support.classes["transformers"].startswith("models/") or "Kimi" in support.architecture
    assert support.classes["sglang"].startswith("srt/models/")
    assert "heads of attention" in support.known


@pytest.mark.parametrize("kind", MODELS)
def test_every_tensor_of_a_known_family_has_a_row(tmp_path: Path, kind: str) -> None:
    support = find_support(write_model(kind, tmp_path))
    assert support.rows is not None
    assert not (support.rows.missing or support.rows.unfilled or support.rows.reshaped)
    assert support.is_supported


def test_a_published_kimi_k25_is_supported(tmp_path: Path, capsys: Any) -> None:
    assert main(["support", str(write_config(tmp_path / "published", CONFIG))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "KimiK25ForConditionalGeneration: supported"
    assert "weights: INT4, which is read as it is" in lines
    assert not [line for line in lines if "not trained" in line]
    assert main(["support", str(write_int4_kimi_k25_model(tmp_path / "tiny"))]) == 0, (
        "the two matrices of the projector differ in their shapes"
    )
    assert "rows: every tensor has one" in capsys.readouterr().out


def test_a_nearly_known_family_lacks_a_table_alone(tmp_path: Path) -> None:
    """Mistral is a Llama by another name: every tensor has a row in Llama's table."""
    by_config = find_support(write_config(tmp_path / "config", MISTRAL))
    assert by_config.refusal == "no table has this architecture"
    assert not by_config.missing and not by_config.settings and by_config.rows is None
    windowed = find_support(write_config(tmp_path / "windowed", MISTRAL | {"sliding_window": 8}))
    assert windowed.missing.keys() == {"attention in a window or in chunks"}
    support = find_support(save_random(tmp_path / "files", "MistralConfig", num_key_value_heads=2))
    assert support.nearest == "LlamaForCausalLM"
    assert support.rows is not None and not support.rows.missing and not support.rows.unfilled
    assert not support.rows.reshaped and not support.is_supported
    assert support.classes["sglang"] == "srt/models/mistral.py"


def test_rows_that_are_missing_are_named_with_their_shapes(tmp_path: Path, capsys: Any) -> None:
    """Phi-3 has queries, keys and values in one tensor, and gate and up in another."""
    folder = save_random(
        tmp_path / "phi3", "Phi3Config", num_key_value_heads=2, pad_token_id=0, eos_token_id=1
    )
    assert main(["support", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Phi3ForCausalLM: no table has this architecture"
    assert "missing row: layers.{layer}.self_attn.qkv_proj.weight [128, 64], 2 tensors" in lines
    assert "missing row: layers.{layer}.mlp.gate_up_proj.weight [192, 64], 2 tensors" in lines
    assert "row without tensors: layers.{layer}.self_attn.q_proj.weight" in lines
    assert lines[-1] == "how to write what is missing: docs/add_a_family.md"
    assert main(["support", str(folder), "--json"]) == 1
    encoded = json.loads(capsys.readouterr().out)
    assert encoded["rows"]["missing"]["layers.{layer}.mlp.gate_up_proj.weight"] == [[192, 64], 2]
    assert encoded["supported"] is False


def test_an_unknown_family_names_what_would_have_to_be_written(tmp_path: Path) -> None:
    support = find_support(write_config(tmp_path, HYBRID))
    assert not support.is_supported
    assert {"Mamba", "experts of a smaller width than the model"} <= support.missing.keys()
    assert "a hybrid model in place of GPTModel" in support.missing["Mamba"]
    assert support.settings == {"time_step_limit": [0.0, 1.0]}
    assert support.nearest == "Glm4MoeForCausalLM"
    assert support.lacking == ("moe_intermediate_size", "rms_norm_eps")
    assert {"heads of attention", "routed experts"} <= set(support.known)


def test_minimax_m3_lacks_attention_to_blocks_of_keys(tmp_path: Path, capsys: Any) -> None:
    text = {
        **{key: value for key, value in MISTRAL.items() if key != "architectures"},
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sparse_attention_config": {"sparse_block_size": 128, "sparse_topk_blocks": 16},
    }
    config = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 64},
    }
    assert main(["support", str(write_config(tmp_path, config))]) == 1
    out = capsys.readouterr().out
    assert out.startswith("MiniMaxM3SparseForConditionalGeneration: its attention reads blocks")
    assert "sglang: srt/models/minimax_m3_vl.py" in out
    assert "missing part: attention to keys that an indexer chooses" in out
    assert "routed experts" in out.partition("known parts: ")[2].splitlines()[0]


def test_hyper_connections_are_a_part_of_their_own(tmp_path: Path) -> None:
    support = find_support(
        write_config(tmp_path, {**MISTRAL, "architectures": ["NoSuch"], "hc_mult": 4})
    )
    [part] = support.missing
    assert "hyper-connections" in part


@pytest.mark.parametrize(
    ("quantization", "weights"),
    [
        (None, "plain"),
        (FP8, "FP8, which is read as it is"),
        ({"quant_method": "fp8"}, "fp8: write them in bfloat16 with mcore-rl-ckpt dequantize"),
        ({"quant_method": "gptq"}, "quant_method='gptq', which nothing here reads"),
    ],
)
def test_it_says_how_weights_are_stored(tmp_path: Path, quantization: Any, weights: str) -> None:
    settings = MISTRAL | {"architectures": ["LlamaForCausalLM"]}
    support = find_support(write_config(tmp_path, settings | {"quantization_config": quantization}))
    assert support.weights.startswith(weights)
    assert support.is_supported


def test_a_setting_of_a_known_family_may_be_refused(tmp_path: Path) -> None:
    settings = MISTRAL | {"architectures": ["LlamaForCausalLM"], "hidden_act": "gelu"}
    support = find_support(write_config(tmp_path, settings))
    assert support.refusal.startswith("hidden_act='gelu'") and not support.is_supported


def test_an_index_alone_gives_names(tmp_path: Path) -> None:
    write_config(tmp_path, MISTRAL)
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.attn_gate.weight",
    ]
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    support = find_support(tmp_path)
    assert support.rows is not None
    assert support.rows.missing == {"layers.{layer}.attn_gate.weight": (None, 1)}


def test_what_is_no_config_is_told(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text("[]")
    assert main(["support", str(tmp_path)]) == 2
    assert "is not a JSON object" in capsys.readouterr().err
    assert main(["support", str(write_config(tmp_path, {}))]) == 1
    assert capsys.readouterr().out.startswith("no architecture: no table has this architecture")


def test_every_table_is_nearest_to_its_own_names() -> None:
    for family in LANGUAGE:
        assert find_nearest({"architectures": [family.architecture]}, []) is family
    pattern = "layers.{layer}.mlp.experts.{expert}.up_proj.weight"
    for prefix in ("model.", "language_model.model.", "model.language_model."):
        for part in ("", "_packed", "_scale", "_scale_inv"):
            name = f"{prefix}layers.7.mlp.experts.31.up_proj.weight{part}"
            assert make_pattern(name) == pattern


def test_keys_belong_to_one_part() -> None:
    keys = [key for part in PARTS for key in part.keys]
    assert len(keys) == len(set(keys))
    assert isinstance(find_support(ROOT / "recipes/model/kimi_k2"), Support)
