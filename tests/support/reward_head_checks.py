"""The score heads that SGLang builds for a reward model, with and without our classes.

The arguments are folders of reward models. The last line of output is a JSON list with, for each
folder: the module of the class that SGLang chose, and whether SGLang's own class and the chosen one
have a bias; the parameters that its loader did not fill; whether the head has the weight on disk.
"""

# pyright: reportMissingImports=false

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mcore_rl.device.sglang_setup import use_cpu
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from tests.support.sglang_layout_checks import engine_model


def describe(folder: str) -> dict[str, Any]:
    """Build and load the model as an engine does; see the module for what is returned."""
    weights = load_file(Path(folder) / "model.safetensors")
    with engine_model(folder, "float32", SGLangSizes(), 0) as model:
        chosen_class = type(model)
        upstream_class = chosen_class.__mro__[1]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(math.nan)
        model.load_weights(weights.items())
        unfilled = [name for name, p in model.named_parameters() if p.isnan().any()]
        upstream = upstream_class(model.config)
        return {
            "module": chosen_class.__module__,
            "upstream_module": upstream_class.__module__,
            "upstream_has_bias": upstream.score.bias is not None,
            "has_bias": model.score.bias is not None,
            "unfilled": unfilled,
            "score_is_loaded": torch.equal(model.score.weight, weights["score.weight"]),
        }


if __name__ == "__main__":
    os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "mcore_rl.rollout.reward_heads"
    use_cpu([])
    print(json.dumps([describe(folder) for folder in sys.argv[1:]]))
