"""The format of INT4 weights as Kimi-K2.5 publishes them: compressed-tensors, pack-quantized.

    X.weight [N, K] bfloat16         X.weight_packed  int32     [N, K / 8]   8 values of 4 bits
    |32 values|32 values| ...   ==>  X.weight_scale   bfloat16  [N, K / 32]  a scale per group
    |32 values|32 values| ...        X.weight_shape   int32     [2]          N, K

The first of 8 values is in the lowest 4 bits; each is stored plus 8. A weight is (value - 8) *
scale of its group, rounded to the scales' dtype.

Source: compressed-tensors 0.18.0, compressors/pack_quantized and quantization/lifecycle.
"""

from collections.abc import Iterable, Mapping
from typing import Any

GROUP = 32
"""Values of a row that share a scale."""
PER_WORD = 8
"""Values in a 32-bit word."""
PACKED_DTYPE = "int32"
SCALE_DTYPE = "bfloat16"
METHOD = "compressed-tensors"
FORMAT = "pack-quantized"
PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
"""Suffixes of the three tensors that encode a matrix."""
TEXT = "text_config"
KEY = "quantization_config"

QUANTIZATION_CONFIG: Mapping[str, Any] = {
    "quant_method": METHOD,
    "format": FORMAT,
    "quantization_status": "compressed",
    "ignore": [r"re:(?!.*\.experts\.\d+\.)"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": GROUP,
                "symmetric": True,
                "dynamic": False,
            },
        }
    },
}
"""The "quantization_config" in config.json of a model whose routed experts have such weights."""

_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": ("int",),
    "strategy": ("group",),
    "group_size": (GROUP,),
    "symmetric": (True,),
    "dynamic": (False, None),
    "actorder": (None,),
}
"""Key of a config group's `weights` -> the values that can be read."""


def find_quantization(config: Mapping[str, Any]) -> Any:
    """Return `quantization_config` of the model or of its language model; None if it has none."""
    text = config.get(TEXT)
    nested = text.get(KEY) if isinstance(text, Mapping) else None
    return nested if config.get(KEY) is None else config[KEY]


def find_int4_problem(config: Mapping[str, Any]) -> str | None:
    """Return "" for a model in this format, else what is different; None for another method."""
    settings = find_quantization(config)
    if not isinstance(settings, Mapping) or settings.get("quant_method") != METHOD:
        return None
    groups = settings.get("config_groups")
    found = list(groups.values()) if isinstance(groups, Mapping) else []
    if settings.get("format") != FORMAT or len(found) != 1 or not isinstance(found[0], Mapping):
        return f"format={settings.get('format')!r} with {len(found)} config_groups"
    for key in ("input_activations", "output_activations"):
        if found[0].get(key) is not None:
            return f"{key}={found[0][key]!r:.80}"
    weights = found[0].get("weights")
    if not isinstance(weights, Mapping):
        return f"weights={weights!r:.80}"
    for key, values in _PLAIN.items():
        if weights.get(key) not in values:
            return f"{key}={weights.get(key)!r} of weights"
    return ""


def is_int4(config: Mapping[str, Any]) -> bool:
    """Return whether the weights of the model are in this format."""
    return find_int4_problem(config) == ""


def list_part_names(name: str) -> tuple[str, str, str]:
    """Return the HF names of the packed values, the scales and the shape of the matrix `name`."""
    return name + PACKED, name + SCALE, name + SHAPE


def split_part(name: str) -> tuple[str, str] | None:
    """Return the matrix that `name` is a part of, and the part's suffix; None for other names."""
    for suffix in (PACKED, SCALE, SHAPE):
        if name.endswith(".weight" + suffix):
            return name.removesuffix(suffix), suffix
    return None


def find_int4_names(names: Iterable[str]) -> list[str]:
    """Return the matrices in this format among the stored HF names, in their order."""
    return [name.removesuffix(PACKED) for name in names if name.endswith(".weight" + PACKED)]
