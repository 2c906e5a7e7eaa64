"""Tiny random Kimi-VL and Kimi-K2.5 directories, and an oracle made of transformers' modules.

transformers has no Kimi-VL. Its Kimi-K2.5 has the same tower if images have one frame, but turns
halves of a head where both checkpoints turn pairs, and has q, k and v apart:

    wqkv rows of a head, pairs (0 1)(2 3)   ->   q_proj, halves (0 2)(1 3)

The images and text are those of tiny_vision.py, with one frame.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.tiny_models import write_model
from tests.support.tiny_vision import PLACEHOLDER

PIXELS = 3 * 14 * 14
VISION: dict[str, Any] = {
    "model_type": "moonvit",
    "patch_size": 14,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "init_pos_emb_height": 4,  # as one image here has; the oracle knows square tables only
    "init_pos_emb_width": 4,
    "merge_kernel_size": [2, 2],
}
KIMI_VL_PROCESSOR: dict[str, Any] = {
    "auto_map": {
        "AutoImageProcessor": "image_processing_kimi_vl.KimiVLImageProcessor",
        "AutoProcessor": "processing_kimi_vl.KimiVLProcessor",
    },
    "image_processor_type": "KimiVLImageProcessor",
    "in_token_limit": 4096,
    "patch_size": 14,
    "num_pooled_tokens": 1024,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "pad_input": True,
    "merge_kernel_size": [2, 2],
}
"""preprocessor_config.json of the published model."""
KIMI_K25_PROCESSOR: dict[str, Any] = {
    "auto_map": {
        "AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor",
        "AutoProcessor": "kimi_k25_processor.KimiK25Processor",
    },
    "media_proc_cfg": {
        "in_patch_limit": 16384,
        "patch_size": 14,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 512,
        "in_patch_limit_each_frame": 4096,
        "in_patch_limit_video": None,
        "sample_fps": 2.0,
        "max_num_frames_each_video": None,
        "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff",
    },
}
"""The same for Kimi-K2.5."""
LANGUAGE = "language_model."
TOWER = "vision_tower."
MERGER = "multi_modal_projector."
K25_PROJECTOR = {
    f"{MERGER}pre_norm": "mm_projector.pre_norm",
    f"{MERGER}linear_1": "mm_projector.proj.0",
    f"{MERGER}linear_2": "mm_projector.proj.2",
}
"""Names of Kimi-VL's projector -> those of Kimi-K2.5."""
SIZED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
"""Keys of VISION that begin with vt_ in Kimi-K2.5."""


def write_kimi_vl_model(
    folder: Path, seed: int = 0, vision: Mapping[str, Any] | None = None, **text: Any
) -> Path:
    """Save a random model: a dense layer, 3 layers with experts, a tower of 2 blocks.

    `vision` changes settings of the tower, `text` those of the language model.
    """
    tower = {**VISION, **(vision or {})}
    language = _write_parts("moonlight", folder, seed, tower, **text)
    parts = {"text_config": language, "vision_config": tower}
    parts["vocab_size"] = language["vocab_size"]
    _write_config(folder, "KimiVL", "kimi_vl", parts)
    return folder


def write_kimi_k25_model(
    folder: Path, seed: int = 0, vision: Mapping[str, Any] | None = None, **text: Any
) -> Path:
    """Save the same as a Kimi-K2.5 whose weights are not quantized."""
    tower = {**VISION, **(vision or {})}
    language = _write_parts("kimi_k2", folder, seed, tower, **text)
    path = folder / "model.safetensors"
    save_file(with_k25_names(load_file(path)), path, metadata={"format": "pt"})
    parts: dict[str, Any] = {"text_config": language, "tie_word_embeddings": False}
    parts["vision_config"] = make_published_vision(tower)
    _write_config(folder, "KimiK25", "kimi_k25", parts)
    return folder


def with_k25_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return Kimi-VL's tensors under the names of Kimi-K2.5."""
    renamed = {}
    for name, tensor in weights.items():
        module, _, kind = name.rpartition(".")
        renamed[f"{K25_PROJECTOR.get(module, module)}.{kind}"] = tensor
    return renamed


def make_published_vision(tower: Mapping[str, Any], out: int = 64) -> dict[str, Any]:
    """Return vision_config of Kimi-K2.5, with the keys that the published one has."""
    sides = ("init_pos_emb_height", "init_pos_emb_width", "merge_kernel_size", "patch_size")
    return {
        **{key: tower[key] for key in sides},
        **{f"vt_{key}": tower[key] for key in SIZED},
        "init_pos_emb_time": 4,
        "merge_type": "sd2_tpool",
        "mm_hidden_size": tower["hidden_size"],
        "mm_projector_type": "patchmerger",
        "model_type": "",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-05,
        "text_hidden_size": out,
        "video_attn_type": "spatial_temporal",
    }


def _write_parts(
    kind: str, folder: Path, seed: int, tower: Mapping[str, Any], **text: Any
) -> dict[str, Any]:
    """Save a random language model and tower under Kimi-VL's names; return the former's config."""
    write_model(kind, folder, seed, **text)
    weights = load_file(folder / "model.safetensors")
    language: dict[str, Any] = json.loads((folder / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    renamed = {LANGUAGE + name: tensor for name, tensor in weights.items()}
    for name, shape in tower_shapes(tower, language["hidden_size"]).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            renamed[name] = 1 + 0.1 * noise
        else:
            renamed[name] = 0.05 * noise
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    return language


def _write_config(folder: Path, family: str, model_type: str, parts: Mapping[str, Any]) -> None:
    config = {
        "architectures": [f"{family}ForConditionalGeneration"],
        "model_type": model_type,
        "dtype": "float32",
        "media_placeholder_token_id": PLACEHOLDER,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **parts,
    }
    (folder / "config.json").write_text(json.dumps(config))


def tower_shapes(vision: Mapping[str, Any], out: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a tower by the names of the published Kimi-VL."""
    hidden, ffn = vision["hidden_size"], vision["intermediate_size"]
    merged = 4 * hidden
    table = (vision["init_pos_emb_height"], vision["init_pos_emb_width"], hidden)
    shapes: dict[str, tuple[int, ...]] = {f"{TOWER}patch_embed.pos_emb.weight": table}
    modules: dict[str, tuple[int, ...]] = {
        f"{TOWER}patch_embed.proj": (hidden, 3, 14, 14),
        f"{TOWER}encoder.final_layernorm": (hidden,),
        f"{MERGER}pre_norm": (hidden,),
        f"{MERGER}linear_1": (merged, merged),
        f"{MERGER}linear_2": (out, merged),
    }
    for block in range(vision["num_hidden_layers"]):
        stem = f"{TOWER}encoder.blocks.{block}."
        modules |= {
            f"{stem}norm0": (hidden,),
            f"{stem}norm1": (hidden,),
            f"{stem}wqkv": (3 * hidden, hidden),
            f"{stem}wo": (hidden, hidden),
            f"{stem}mlp.fc0": (ffn, hidden),
            f"{stem}mlp.fc1": (hidden, ffn),
        }
    for name, shape in modules.items():
        shapes[f"{name}.weight"] = shape
        shapes[f"{name}.bias"] = shape[:1]
    return shapes


NAMES = {
    "vision.patch_embed.pos_emb.position_embeddings": f"{TOWER}patch_embed.pos_emb.weight",
    "vision.layers.": f"{TOWER}encoder.blocks.",
    "vision.final_layernorm.": f"{TOWER}encoder.final_layernorm.",
    "vision.": TOWER,
    "projector.in_proj.": f"{MERGER}linear_1.",
    "projector.out_proj.": f"{MERGER}linear_2.",
    "projector.": MERGER,
    "text.": LANGUAGE,
}
BLOCK_NAMES = {".norm1.": ".norm0.", ".norm2.": ".norm1.", ".fc1.": ".fc0.", ".fc2.": ".fc1."}
"""Names of the oracle -> those of the checkpoint; the first that matches is replaced."""


def checkpoint_name(name: str) -> str:
    old = next(old for old in NAMES if name.startswith(old))
    if old == "vision.layers.":
        found = [part for part in BLOCK_NAMES if part in name]
        if found:
            name = name.replace(found[0], BLOCK_NAMES[found[0]])
        name = name.replace(".attn.proj.", ".wo.").replace(".attn.", ".")
    return NAMES[old] + name.removeprefix(old)


class KimiVl(nn.Module):
    """The oracle: Kimi-K2.5's tower and projector, and DeepSeek-V3, all of transformers."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
        from transformers.models.kimi_k25 import configuration_kimi_k25 as configs
        from transformers.models.kimi_k25 import modeling_kimi_k25 as models

        saved = json.loads((folder / "config.json").read_text())
        settings = saved["text_config"]
        tower = {key.removeprefix("vt_"): value for key, value in saved["vision_config"].items()}
        self.config = SimpleNamespace(
            model_type=saved["model_type"], image_token_id=saved["media_placeholder_token_id"]
        )
        self.num_heads = tower["num_attention_heads"]
        weights = {
            name: tensor
            for file in folder.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        self.projector_names = K25_PROJECTOR if saved["model_type"] == "kimi_k25" else {}
        own = {n.removeprefix(LANGUAGE): t for n, t in weights.items() if n.startswith(LANGUAGE)}
        text: Any = DeepseekV3ForCausalLM
        self.text = text.from_pretrained(
            None, config=DeepseekV3Config(**settings), state_dict=own, dtype=torch.float32
        )
        config: Any = configs.Kimi_K25Config(
            text_config=settings,
            vision_config={
                **{key: tower[key] for key in (*SIZED, "patch_size", "merge_kernel_size")},
                "pos_emb_height": tower["init_pos_emb_height"],
                "pos_emb_width": tower["init_pos_emb_width"],
            },
            projection_hidden_size=tower["hidden_size"],
        )
        vision: Any = models.Kimi_K25VisionModel
        self.vision = vision._from_config(config.vision_config, dtype=torch.float32)
        self.projector = models.Kimi_K25MultimodalProjection(config)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if not name.startswith("text."):
                    parameter.copy_(self._own_part(self.find_saved_name(name), weights))

    def find_saved_name(self, name: str) -> str:
        """Return the name of the checkpoint."""
        module, _, kind = checkpoint_name(name).rpartition(".")
        return f"{self.projector_names.get(module, module)}.{kind}"

    def _own_part(self, name: str, weights: Mapping[str, Tensor]) -> Tensor:
        for part, letter in enumerate("qkv"):
            if f".{letter}_proj." in name:
                rows = weights[name.replace(f".{letter}_proj.", ".wqkv.")].chunk(3)[part]
                return rows if letter == "v" else with_halves(rows, self.num_heads)
        return weights[name]

    def forward(
        self,
        ids_BT: Tensor,
        mm_token_type_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
    ) -> Any:
        embeddings = self.text.model.embed_tokens(ids_BT)
        if pixel_values is not None:
            patches = pixel_values.unflatten(-1, (3, 14, 14))
            images = self.projector(self.vision(patches, image_grid_thw).pooler_output)[:, 0]
            is_image = ids_BT == self.config.image_token_id
            embeddings = embeddings.masked_scatter(is_image[..., None], images)
        return self.text(inputs_embeds=embeddings)

    def saved_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name of the checkpoint, gradient); experts stay stacked."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self.named_parameters():
            name = self.find_saved_name(name)
            assert parameter.grad is not None, name
            letter = next((each for each in "qkv" if f".{each}_proj." in name), None)
            if name.startswith(LANGUAGE) or letter is None:
                yield name, parameter.grad
                continue
            rows = parameter.grad
            if letter != "v":
                rows = with_pairs(rows, self.num_heads)
            parts.setdefault(name.replace(f".{letter}_proj.", ".wqkv."), {})[letter] = rows
        for name, of_letter in parts.items():
            yield name, torch.cat([of_letter[letter] for letter in "qkv"])


def with_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Put the first numbers of each pair of a head before the second ones."""
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def with_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Undo `with_halves`."""
    return rows.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
