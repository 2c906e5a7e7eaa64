"""Checks that the tensors of a HuggingFace directory agree with its config.json."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint_tools.int4 import unpack_names
from checkpoint_tools.packed import collect_stored_names, find_packed
from checkpoint_tools.stored import DTYPE_BYTES, StoredTensor
from mcore_rl.weights.hf.config import (
    parse_hf_config,
    read_hf_config,
    read_named_dtype,
    with_text_settings,
)
from mcore_rl.weights.hf.int4 import is_int4
from mcore_rl.weights.hf.packing import find_packing
from mcore_rl.weights.hf.tied_head import refuse_untied_head
from mcore_rl.weights.models import FAMILIES, family_of, hf_tensor_shapes, refuse_unsupported
from mcore_rl.weights.models.settings import drop_quantization, refuse_quantized
from mcore_rl.weights.models.table import Family, HfConfig, Shape

WRONG_SETTING = (LookupError, TypeError, AttributeError, ArithmeticError)
"""Exceptions that a family's functions may raise on settings of a wrong type or size."""


def read_config(folder: Path, *, takes_fp8: bool = False) -> dict[str, Any]:
    """Return config.json of a model that mcore_rl supports.

    takes_fp8   the weights may be in block FP8, too, which the caller decodes
    Raises ValueError with the file and the setting that is wrong or not supported.
    """
    file = folder / "config.json"
    try:
        config = read_hf_config(folder)
        hf_tensor_shapes(config)
        whole = with_text_settings(parse_hf_config(folder))
        if not takes_fp8 and find_packing(whole) == "fp8":
            refuse_quantized(whole, file)
    except WRONG_SETTING as error:
        raise ValueError(f"{file}: a setting is damaged: {error!r}") from error
    return config


def check_against_config(
    folder: Path, tensors: Mapping[str, StoredTensor], *, either_way: bool = False
) -> str:
    """Compare names, shapes and dtypes of the tensors with config.json.

    Returns the architecture, or a sentence saying why nothing was compared. A quantized matrix and
    its scales count as the tensor that they encode. With `either_way` a stacked expert may lie
    transposed, or each expert by itself. Raises ValueError with the file and tensor that is wrong.
    """
    path = folder / "config.json"
    if not path.is_file():
        return "no config.json: names and shapes were not compared with it"
    config = with_text_settings(parse_hf_config(folder))
    try:
        architecture = (config.get("architectures") or [None])[0]
        if architecture not in FAMILIES:
            reason = "names and shapes were not compared with config.json"
            return f"{architecture} is unknown here: {reason}"
        if is_int4(config):
            tensors = unpack_names(tensors)
        elif config.get("quantization_config") is not None:
            tensors = _find_unpacked(config, tensors, path)
        config = drop_quantization(config)
        refuse_unsupported(config, path)
        family, dtype = family_of(config), find_dtype(config, tensors)
        shapes, dtypes = family.shapes(config), family.dtypes(config, dtype)
    except WRONG_SETTING as error:
        raise ValueError(f"{path}: a setting is damaged: {error!r}") from error
    if either_way:
        shapes = {name: _find_stored(shape, tensors.get(name)) for name, shape in shapes.items()}
        for name in [name for name in shapes if name not in tensors and is_upright(family, name)]:
            singles = list_singles(name, shapes.pop(name))
            shapes |= {single: shape for single, shape, _ in singles}
            dtypes |= {single: dtypes[name] for single, _, _ in singles}
    _compare(folder, config, tensors, shapes, dtypes)
    return architecture


PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Stacked tensor of upright experts -> what each expert has of it, one below the other."""


def is_upright(family: Family, name: str) -> bool:
    """Return whether the tensor stacks a layer's experts as transformers has them."""
    kind = name.rpartition(".")[2]
    return ".experts." in name and kind in PARTS and any(rule.upright for rule in family.rules)


def list_singles(name: str, shape: Shape) -> list[tuple[str, Shape, Shape]]:
    """Return (name, shape, offset in the stacked tensor) of the tensors that transformers saves."""
    module, _, kind = name.rpartition(".")
    rows = shape[1] // len(PARTS[kind])
    return [
        (f"{module}.{expert}.{part}.weight", (rows, shape[2]), (expert, number * rows, 0))
        for expert in range(shape[0])
        for number, part in enumerate(PARTS[kind])
    ]


def _find_stored(shape: Shape, stored: StoredTensor | None) -> Shape:
    """Return `shape`, of stacked experts transposed if they are stored so."""
    if stored is None or len(shape) != 3:
        return shape
    turned = (shape[0], shape[2], shape[1])
    return turned if stored.shape == turned else shape


def _find_unpacked(
    config: HfConfig, tensors: Mapping[str, StoredTensor], path: Path
) -> dict[str, StoredTensor]:
    """Return the tensors of a quantized model by their names and shapes without quantization."""
    packed = find_packed(config, tensors, _check_dtype(config) or "bfloat16", path)
    halves = collect_stored_names(packed)
    plain = {name: tensor for name, tensor in tensors.items() if name not in halves}
    return plain | {
        name: StoredTensor(name, made.dtype, made.shape, (made.values,))
        for name, made in packed.items()
    }


def _check_dtype(config: HfConfig) -> str | None:
    """Return the dtype that config.json gives, or None. Raises ValueError for an unknown one."""
    named = read_named_dtype(config)
    if named and named not in DTYPE_BYTES:
        raise ValueError(f"dtype={named!r} in config.json is not among {', '.join(DTYPE_BYTES)}")
    return named


def find_dtype(config: HfConfig, tensors: Mapping[str, StoredTensor]) -> str:
    """Return the dtype that config.json gives, or else the one that most tensors have."""
    counts = Counter(tensor.dtype for tensor in tensors.values())
    return _check_dtype(config) or counts.most_common(1)[0][0]


def _compare(
    folder: Path,
    config: HfConfig,
    tensors: Mapping[str, StoredTensor],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, str],
) -> None:
    family = family_of(config)
    left_out = family.find_left_out(config)
    for name, tensor in tensors.items():
        if name in left_out or family.is_carried(config, name):
            continue
        where = tensor.chunks[0].where
        if name not in shapes:
            raise ValueError(f"{where} has no place in the model that config.json describes")
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"{where} has shape {tensor.shape}, by config.json it should be {shapes[name]}"
            )
        # Norms, routers and the like are often kept in float32.
        if tensor.dtype not in (dtypes[name], "float32"):
            raise ValueError(
                f"{where} has dtype {tensor.dtype}, by config.json it should be {dtypes[name]}"
            )
    refuse_untied_head({key: Path(t.chunks[0].path) for key, t in tensors.items()}, config)
    missing = sorted(shapes.keys() - tensors.keys())
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(shapes)} tensors of config.json, the first is "
            f"{missing[0]!r}"
        )


def find_tied_heads(folder: Path) -> Mapping[str, str]:
    """Return the output layers that config.json ties -> their embeddings; {} if none is known."""
    if not (folder / "config.json").is_file():
        return {}
    config = with_text_settings(parse_hf_config(folder))
    if (config.get("architectures") or [None])[0] not in FAMILIES:
        return {}
    family = family_of(config)
    return {head: family.tied[head] for head in family.find_left_out(config)}
