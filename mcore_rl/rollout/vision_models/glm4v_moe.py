"""GLM-4.5V with the epsilon of its authors in the last norm of the tower's projector.

SGLang 0.5.23 builds that norm with its own default, 1e-6; transformers and megatron's side use
torch's, 1e-5.
"""

from typing import Any

from sglang.srt.models import glm4v_moe

PROJECTOR_EPS = 1e-5
"""The default of torch.nn.LayerNorm, as in transformers' Glm4vMoeVisionPatchMerger."""


class Glm4vMoeForConditionalGeneration(glm4v_moe.Glm4vMoeForConditionalGeneration):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.visual.merger.post_projection_norm.variance_epsilon = PROJECTOR_EPS


EntryClass = Glm4vMoeForConditionalGeneration
