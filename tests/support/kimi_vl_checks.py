"""Compares SGLang's own class of Kimi-VL with ours, in one process without an engine.

Argument: the folder of a model. The last line of output is JSON: the module of the class that
SGLang chose; the activations of the projectors; which copies of old weights are kept after each way
to give the chosen model others; what SGLang's server opens as the folder's processor.
"""

# pyright: reportMissingImports=false

import json
import os
import sys
from typing import Any

import torch
from safetensors.torch import load_file

from mcore_rl.device.sglang_setup import use_cpu
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from tests.support.sglang_layout_checks import engine_model


def describe(folder: str) -> dict[str, Any]:
    """Build and load the model as an engine does; see the module for what is returned."""
    from sglang.srt.model_loader.loader import post_load_weights
    from sglang.srt.utils.hf_transformers.processor import get_processor

    weights = load_file(f"{folder}/model.safetensors")
    with engine_model(folder, "float32", SGLangSizes(), 0) as model, torch.no_grad():
        chosen_class = type(model)
        upstream = chosen_class.__mro__[1](model.config)
        kept = {}
        for of, built in (("chosen", model), ("upstream", upstream)):
            built.load_weights(weights.items())
            for way, change in (
                ("loaded", lambda built=built: built.load_weights(weights.items())),
                ("in_place", lambda built=built: post_load_weights(built)),
            ):
                kept[f"{of}_{way}"] = keeps(built, change)
    return {
        "module": chosen_class.__module__,
        "activation": type(model.multi_modal_projector.act).__name__,
        "upstream_activation": type(upstream.multi_modal_projector.act).__name__,
        "kept": kept,
        "processor": type(get_processor(folder)).__module__,
    }


def keeps(model: Any, change: Any) -> list[str]:
    """Return which copies of old weights the model still has after `change`."""
    tower = model.vision_tower.eval()
    attention = model.language_model.model.layers[0].self_attn
    table = tower.patch_embed.pos_emb
    table(torch.zeros(12, table.weight.shape[-1]), torch.tensor([[2, 6]]))
    attention.w_kc = torch.full_like(attention.w_kc, 7.0)
    change()
    copies = {
        "positions": bool(table._interpolated_pos_emb_cache),
        "latent": bool((attention.w_kc == 7.0).all()),
    }
    return [name for name, is_kept in copies.items() if is_kept]


if __name__ == "__main__":
    os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "mcore_rl.rollout.vision_models"
    use_cpu([])
    print(json.dumps(describe(sys.argv[1])))
