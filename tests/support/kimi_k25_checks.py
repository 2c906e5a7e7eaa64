"""Compares SGLang's own class of Kimi-K2.5 with ours, in one process without an engine.

Argument: the folder of a model. The last line of output is JSON: the module of the class that
SGLang chose; the widths of its tower and of SGLang's own; whether its latent attention keeps a
product of old weights once others are written in place; the modules of the two processors that
SGLang's server takes.
"""

# pyright: reportMissingImports=false

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

from mcore_rl.device.sglang_setup import use_cpu
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from tests.support.sglang_layout_checks import engine_model

PACKAGE = "mcore_rl.rollout.vision_models"


def describe(folder: str) -> dict[str, Any]:
    """Build and load the model as an engine does; see the module for what is returned."""
    from safetensors.torch import load_file
    from sglang.srt.managers import multimodal_processor as processors
    from sglang.srt.model_loader.loader import post_load_weights
    from sglang.srt.models.kimi_k25 import MoonViT3dPretrainedModel
    from sglang.srt.utils.hf_transformers.config import get_config
    from sglang.srt.utils.hf_transformers.processor import get_processor

    with engine_model(folder, "float32", SGLangSizes(), 0) as model, torch.no_grad():
        model.load_weights(load_file(f"{folder}/model.safetensors").items())
        attention = model.language_model.model.layers[0].self_attn
        attention.w_kc = torch.full_like(attention.w_kc, 7.0)
        post_load_weights(model)
        config = get_config(folder, trust_remote_code=False)
        with torch.device("meta"):
            upstream = MoonViT3dPretrainedModel(config.vision_config)
        chosen = [type(model).__module__, *map(width_of, (model.vision_tower, upstream))]
        keeps = bool((attention.w_kc == 7.0).all())
    for package, overwrite in (("sglang.srt.multimodal.processors", False), (PACKAGE, True)):
        processors.import_processors(package, overwrite)
    served: Any = SimpleNamespace(architectures=[type(model).__name__])
    return {
        "chosen": chosen,
        "keeps": keeps,
        "patches": processors.get_mm_processor_cls(served).__module__,
        "chats": type(get_processor(folder)).__module__,
    }


def width_of(tower: Any) -> int:
    return tower.patch_embed.proj.weight.shape[0]


if __name__ == "__main__":
    os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = PACKAGE
    use_cpu([])
    print(json.dumps(describe(sys.argv[1])))
