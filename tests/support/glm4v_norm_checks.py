"""The epsilon of the last norm of GLM-4.5V's projector, in SGLang's own class and in ours.

The argument is a folder of a GLM-4.5V. The last line of output is a JSON object: the module of the
class that SGLang chose, and the epsilon of its model and of SGLang's own.
"""

# pyright: reportMissingImports=false

import json
import os
import sys

from mcore_rl.device.sglang_setup import use_cpu
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from tests.support.sglang_layout_checks import engine_model


def describe(folder: str) -> dict[str, str | float]:
    """Build the model as an engine does, and SGLang's own class of the same config."""
    with engine_model(folder, "float32", SGLangSizes(), 0) as model:
        chosen_class = type(model)
        upstream = chosen_class.__mro__[1](model.config)
        return {
            "module": chosen_class.__module__,
            "eps": model.visual.merger.post_projection_norm.variance_epsilon,
            "upstream_eps": upstream.visual.merger.post_projection_norm.variance_epsilon,
        }


if __name__ == "__main__":
    os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "mcore_rl.rollout.vision_models"
    use_cpu([])
    print(json.dumps(describe(sys.argv[1])))
