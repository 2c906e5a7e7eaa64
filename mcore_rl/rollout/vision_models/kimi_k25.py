"""Kimi-K2.5 with the tower of config.json and an image processor of our own.

SGLang 0.5.23 reads the sizes of its tower under other keys than the published config.json has, and
takes those of the published model without them. Its processor is built around code of the
checkpoint, makes patches of its own on GPUs, and refuses ids whose placeholders are expanded;
that of Kimi-VL takes such ids with patches.
"""

from typing import Any, ClassVar

from sglang.srt.configs.kimi_k25 import KimiK25Config
from sglang.srt.models import kimi_k25
from sglang.srt.multimodal.customized_mm_processor_utils import register_customized_processor

from mcore_rl.rollout.vision_models.kimi_processor import KimiK25Processor
from mcore_rl.rollout.vision_models.kimi_vl import KimiVLImageProcessor

PREFIX = "vt_"
"""The beginning of the published keys of the tower's sizes."""


class KimiK25ForConditionalGeneration(kimi_k25.KimiK25ForConditionalGeneration):
    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        settings = config.vision_config.to_dict().items()
        config.vision_config.update(
            {key.removeprefix(PREFIX): value for key, value in settings if key.startswith(PREFIX)}
        )
        super().__init__(config, *args, **kwargs)


class KimiK25ImageProcessor(KimiVLImageProcessor):
    models: ClassVar[list[type]] = [KimiK25ForConditionalGeneration]


register_customized_processor(KimiK25Processor)(KimiK25Config)  # type: ignore[arg-type]
EntryClass = KimiK25ForConditionalGeneration
