"""Both layouts of a weight sync as a few numbers, which travel to all ranks as JSON.

    config.json, dtype  + MegatronSizes(tp=2, ...)  -->  source(): the trainer's layout
                        + SGLangSizes(tp=4, ...)    -->  target(): the engines' layout

Every rank derives from them what all other ranks hold.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mcore_rl.weights.layouts.layout import Layout
from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.layouts.quantized import QuantizedLayout
from mcore_rl.weights.layouts.sglang import SGLangLayout
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from mcore_rl.weights.models import family_of


@dataclass(frozen=True)
class RecordedLayouts:
    """The numbers that the layouts of both sides follow from.

    hf_config   config.json
    dtype       torch name of the model's dtype on both sides
    fp8         whether engines hold projections in FP8
    """

    hf_config: Mapping[str, Any]
    dtype: str
    trainer: MegatronSizes
    engines: SGLangSizes
    fp8: bool = False

    def source(self) -> MegatronLayout:
        """Return the trainer's layout. Raises ValueError if the sizes do not divide the model."""
        return MegatronLayout(family_of(self.hf_config), self.hf_config, self.trainer, self.dtype)

    def target(self) -> Layout:
        """Return the engines' layout. Raises ValueError if the sizes do not divide the model."""
        layout = SGLangLayout(family_of(self.hf_config), self.hf_config, self.engines, self.dtype)
        return QuantizedLayout(layout) if self.fp8 else layout

    def encode(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def decode(text: str) -> "RecordedLayouts":
        fields = json.loads(text)
        stage_layers = tuple(fields["trainer"].pop("stage_layers"))
        trainer = MegatronSizes(**fields["trainer"], stage_layers=stage_layers)
        engines = SGLangSizes(**fields["engines"])
        return RecordedLayouts(
            fields["hf_config"], fields["dtype"], trainer, engines, fields["fp8"]
        )
