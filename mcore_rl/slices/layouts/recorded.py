"""Both sides of a weight sync in a few numbers: what a rank has to know of all the others, as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mcore_rl.slices.families import family_of
from mcore_rl.slices.layouts.layout import Layout
from mcore_rl.slices.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.slices.layouts.quantised import QuantisedLayout
from mcore_rl.slices.layouts.sglang import SGLangLayout
from mcore_rl.slices.layouts.sglang_models import SGLangSizes


@dataclass(frozen=True)
class RecordedLayouts:
    """`dtype`: torch name of the model's dtype on both sides; `fp8`: engines hold projections in FP8."""

    hf_config: Mapping[str, Any]
    dtype: str
    trainer: MegatronSizes
    engines: SGLangSizes
    fp8: bool = False

    def source(self) -> MegatronLayout:
        """ValueError names the two numbers where the sizes do not divide the model."""
        return MegatronLayout(family_of(self.hf_config), self.hf_config, self.trainer, self.dtype)

    def target(self) -> Layout:
        """ValueError as of `source`."""
        layout = SGLangLayout(family_of(self.hf_config), self.hf_config, self.engines, self.dtype)
        return QuantisedLayout(layout) if self.fp8 else layout

    def encode(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def decode(text: str) -> "RecordedLayouts":
        fields = json.loads(text)
        trainer, engines = MegatronSizes(**fields["trainer"]), SGLangSizes(**fields["engines"])
        return RecordedLayouts(
            fields["hf_config"], fields["dtype"], trainer, engines, fields["fp8"]
        )


def hf_tensors(layout: Layout) -> dict[str, tuple[tuple[int, ...], str]]:
    """HF name -> shape and dtype of every tensor that the layout's ranks hold."""
    found = {}
    for name in layout.all_names():
        pieces = layout.placement(name).pieces
        found[name] = (
            tuple(map(max, *(piece.stop for piece in pieces), pieces[0].stop)),
            pieces[0].dtype,
        )
    return found
