"""config.json of a HuggingFace directory in, the tensors that its model has out; the files must have them."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint_tools.stored import DTYPE_BYTES, StoredTensor
from mcore_rl.slices.families import FAMILIES, family_of, hf_tensor_shapes, refuse_unsupported
from mcore_rl.slices.families.table import HfConfig, Shape
from mcore_rl.slices.fp8 import (
    FP8,
    QUANTIZATION_CONFIG,
    SCALE_DTYPE,
    is_converted,
    num_blocks,
    scale_name,
    scaled_name,
)
from mcore_rl.slices.hf_config import read_hf_config

WRONG_SETTING = (LookupError, TypeError, AttributeError, ArithmeticError)
"""What a family's functions may raise on settings of a wrong type or size."""


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model that mcore_rl supports; ValueError names the file and what is wrong with it."""
    try:
        config = read_hf_config(folder)
        hf_tensor_shapes(config)
    except WRONG_SETTING as error:
        raise ValueError(f"{folder / 'config.json'}: a setting is damaged: {error!r}") from error
    return config


def check_against_config(folder: Path, tensors: Mapping[str, StoredTensor]) -> str:
    """Compare names, shapes and dtypes; a word on what was compared. ValueError names file and tensor."""
    path = folder / "config.json"
    if not path.is_file():
        return "no config.json: names and shapes were not compared with it"
    try:
        config = json.loads(path.read_text())
        architecture = (config.get("architectures") or [None])[0]
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if architecture not in FAMILIES:
        return f"{architecture} is unknown here: names and shapes were not compared with config.json"
    is_fp8 = config.get("quantization_config") == QUANTIZATION_CONFIG
    if is_fp8:
        config = {**config, "quantization_config": None}
    try:
        refuse_unsupported(config, path)
        shapes, dtypes = expected_tensors(config, model_dtype(config, tensors), is_fp8)
    except WRONG_SETTING as error:
        raise ValueError(f"{path}: a setting is damaged: {error!r}") from error
    _compare(folder, config, tensors, shapes, dtypes)
    return architecture


def model_dtype(config: HfConfig, tensors: Mapping[str, StoredTensor]) -> str:
    """The dtype that config.json gives, else the one that most tensors have."""
    named = config.get("dtype") or config.get("torch_dtype")
    if named and named not in DTYPE_BYTES:
        raise ValueError(f"dtype={named!r} in config.json is not among {', '.join(DTYPE_BYTES)}")
    return named or Counter(tensor.dtype for tensor in tensors.values()).most_common(1)[0][0]


def expected_tensors(config: HfConfig, dtype: str, is_fp8: bool) -> tuple[dict[str, Shape], dict[str, str]]:
    """Shapes and dtypes by name, with the scales of 8-bit matrices."""
    family = family_of(config)
    shapes, dtypes = family.shapes(config), family.dtypes(config, dtype)
    for name in [name for name in shapes if is_fp8 and is_converted(name) and len(shapes[name]) == 2]:
        dtypes[name] = FP8
        shapes[scale_name(name)] = tuple(map(num_blocks, shapes[name]))
        dtypes[scale_name(name)] = SCALE_DTYPE
    return shapes, dtypes


def is_carried(config: HfConfig, name: str) -> bool:
    """Whether the tensor, or the matrix that it scales, is one beside the model."""
    return family_of(config).is_carried(config, scaled_name(name) or name)


def _compare(
    folder: Path,
    config: HfConfig,
    tensors: Mapping[str, StoredTensor],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, str],
) -> None:
    passed_over = family_of(config).left_out(config)
    for name, tensor in tensors.items():
        if name in passed_over or is_carried(config, name):
            continue
        where = tensor.chunks[0].where
        if name not in shapes:
            raise ValueError(f"{where} has no place in the model that config.json describes")
        if tensor.shape != shapes[name]:
            raise ValueError(f"{where} has shape {tensor.shape}, by config.json it should be {shapes[name]}")
        # Norms, routers and the like are often kept in float32.
        if tensor.dtype not in (dtypes[name], "float32"):
            raise ValueError(f"{where} has dtype {tensor.dtype}, by config.json it should be {dtypes[name]}")
    missing = sorted(shapes.keys() - tensors.keys())
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(shapes)} tensors of config.json, the first is "
            f"{missing[0]!r}"
        )


def with_dtype(config: HfConfig, dtype: str) -> dict[str, Any]:
    """config.json of the same model in another dtype; the older spelling of the key goes."""
    return {**{key: value for key, value in config.items() if key != "torch_dtype"}, "dtype": dtype}
