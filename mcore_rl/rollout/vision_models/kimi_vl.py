"""Kimi-VL with the activation of its authors, renewable weights and an image processor of our own.

SGLang 0.5.23's projector has a sigmoid in place of the error function of GELU. Its model keeps
what it has computed of weights: latent attention's matrices and interpolated positions.
"""

from typing import Any, ClassVar

from sglang.srt.configs.kimi_vl import KimiVLConfig
from sglang.srt.models import kimi_vl
from sglang.srt.multimodal.customized_mm_processor_utils import register_customized_processor
from sglang.srt.multimodal.processors import kimi_vl as processors
from torch import nn

from mcore_rl.rollout.vision_models.kimi_processor import KimiVlProcessor


class KimiVLForConditionalGeneration(kimi_vl.KimiVLForConditionalGeneration):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.multi_modal_projector.act = nn.GELU()

    def load_weights(self, weights: Any) -> None:
        """Load from a checkpoint, and forget what was computed of the weights before."""
        super().load_weights(weights)
        self._forget_positions()

    def post_load_weights(self) -> None:
        """Compute anew what depends on weights that were written in place."""
        assert self.language_model is not None
        self.language_model.post_load_weights()
        self._forget_positions()

    def _forget_positions(self) -> None:
        self.vision_tower.patch_embed.pos_emb._interpolated_pos_emb_cache.clear()


class KimiVLImageProcessor(processors.KimiVLImageProcessor):
    models: ClassVar[list[type]] = [KimiVLForConditionalGeneration]

    async def process_mm_data_async(
        self, image_data: Any, input_text: Any, request_obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Refuse videos, which SGLang leaves out without a word; ValueError is a client's fault."""
        if getattr(request_obj, "video_data", None):
            raise ValueError("the model reads no videos: give their frames as images")
        return await super().process_mm_data_async(
            image_data, input_text, request_obj, *args, **kwargs
        )


register_customized_processor(KimiVlProcessor)(KimiVLConfig)  # type: ignore[arg-type]
EntryClass = KimiVLForConditionalGeneration
