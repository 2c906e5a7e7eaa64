"""Qwen2.5-VL: the language model of Qwen2 with a rotary embedding of three axes, and a tower.

Time, height and width of a position rotate parts of each head of their own, whose sizes
`mrope_section` gives (Qwen2-VL, arXiv:2409.12191, section 2.1).
"""

from collections.abc import Mapping
from typing import Any

from mcore_rl.weights.models import rules, tower
from mcore_rl.weights.models.settings import (
    PLAIN_SETTINGS,
    base_options,
    base_sizes,
    grouped_query_options,
    grouped_query_sizes,
    need,
    rope_of,
)
from mcore_rl.weights.models.table import Family, HfConfig


def sizes(config: HfConfig) -> Mapping[str, int]:
    attention = grouped_query_sizes(config, qkv_bias=True)
    return {**base_sizes(config), **attention, **tower.tower_sizes(config)}


def options(config: HfConfig) -> dict[str, Any]:
    return {
        **base_options(config),
        **grouped_query_options(sizes(config)),
        "mrope_section": list(need(rope_of(config), "mrope_section")),
    }


def refusal(config: HfConfig) -> str:
    return tower.section_refusal(config, sizes(config)["head"]) or tower.tower_refusal(config)


FAMILY = Family(
    "Qwen2_5_VLForConditionalGeneration",
    (*rules.MODEL, *rules.GROUPED_QUERY_ATTENTION, *rules.DENSE_MLP, *tower.RULES),
    sizes,
    lambda config, layer: False,
    options,
    PLAIN_SETTINGS,
    rope_types=("default", "mrope"),
    refusal=refusal,
    explicit=("num_key_value_heads",),
)
