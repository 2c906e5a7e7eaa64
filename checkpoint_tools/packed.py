"""Finds the tensors that values and scales encode, without torch; unpack.py decodes them.

fp8, as DeepSeek-V3's     X.weight   float8_e4m3fn [N, K]        --> X.weight  [N, K]
                          X.weight_scale_inv  [N / rows, K / columns], rounded up: values * scale
                                              of the block
mxfp4, as gpt-oss's       X_blocks   uint8 [E, N, K / 32, 16]    --> X         [E, K, N]
                          X_scales   uint8 [E, N, K / 32]: values * 2 ** (scale - 127)
A byte of the blocks is two values of 4 bits, the low one first (OCP Microscaling Formats, version
1.0). The tensors are found in the headers of a quantized model's files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from checkpoint_tools.stored import DTYPE_BYTES, Chunk, StoredTensor
from mcore_rl.weights.hf.fp8 import FP8, find_scaled_name
from mcore_rl.weights.models.settings import DEQUANTIZABLE
from mcore_rl.weights.models.table import HfConfig, Shape

FP8_SCALE_DTYPES = ("float32", "bfloat16", "float16")
MXFP4_GROUP = 32
MXFP4_GROUP_BYTES = 16
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class Packed:
    """A tensor of `shape` and `dtype` that is to be made of stored values and their blocks' scales.

    block   rows and columns that share a scale; for mxfp4 one row, 32 columns
    """

    name: str
    dtype: str
    shape: Shape
    values: Chunk
    scales: Chunk
    format: Literal["fp8", "mxfp4"]
    block: Shape

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def held_bytes(self) -> int:
        """Bytes that a worker holds at once: for fp8 all scales, for mxfp4 an expert as stored."""
        if self.format == "fp8":
            return prod(self.scales.shape) * DTYPE_BYTES["float32"]
        return (self.values.num_bytes + self.scales.num_bytes) // max(1, self.shape[0])

    def places(self) -> list[object]:
        """Return where its elements come from, as JSON-like values for a digest."""
        stored = [(chunk.path, chunk.start, chunk.dtype) for chunk in (self.values, self.scales)]
        return [self.format, self.block, stored]


def find_packed(
    config: HfConfig, tensors: Mapping[str, StoredTensor], dtype: str, file: object
) -> dict[str, Packed]:
    """Return the quantized tensors of a model by their names without quantization.

    dtype   of the tensors to make
    file    path of `config`, for messages
    Raises ValueError with `file`, or with file and tensor, for a quantization that is not supported
    and for values or scales whose other half is missing or has another shape.
    """
    settings = config.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method not in DEQUANTIZABLE:
        raise ValueError(
            f"{file}: quant_method={method!r} in quantization_config: only"
            f" {' and '.join(map(repr, DEQUANTIZABLE))} can be dequantized"
        )
    assert isinstance(settings, dict)
    find = (
        _fp8(tensors, dtype, _find_block(settings, file))
        if method == "fp8"
        else _mxfp4(tensors, dtype)
    )
    packed = {made.name: made for made in find}
    taken = collect_stored_names(packed)
    for name, tensor in tensors.items():
        if name not in taken and (tensor.dtype == "uint8" or tensor.dtype.startswith("float8")):
            raise ValueError(f"{_where(tensor)} is {tensor.dtype}, and no tensor has its scales")
        if name in packed and name not in taken:
            raise ValueError(
                f"{_where(tensor)} is stored twice, also as {packed[name].values.where}"
            )
    if not packed:
        raise ValueError(
            f"{file}: quant_method={method!r}, but none of {len(tensors)} tensors is quantized"
        )
    return packed


def collect_stored_names(packed: Mapping[str, Packed]) -> set[str]:
    """Return the names under which values and scales are stored."""
    return {chunk.key for made in packed.values() for chunk in (made.values, made.scales)}


def _find_block(settings: Mapping[str, Any], file: object) -> Shape:
    """Return rows and columns of a block of 8-bit values. Raises ValueError if not supported."""
    block = settings.get("weight_block_size")
    is_supported = (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    )
    if not is_supported:
        raise ValueError(
            f"{file}: weight_block_size={block!r} in quantization_config: only blocks of [rows,"
            " columns] are supported, as [128, 128]; not one scale per matrix or row"
        )
    for key, values in {"fmt": ("e4m3", FP8), "activation_scheme": ("dynamic",)}.items():
        if settings.get(key) not in (None, *values):
            wanted = " or ".join(map(repr, values))
            raise ValueError(
                f"{file}: {key}={settings[key]!r} in quantization_config: only {wanted} is"
                " supported"
            )
    assert isinstance(block, list)
    return tuple(block)


def _fp8(tensors: Mapping[str, StoredTensor], dtype: str, block: Shape) -> Iterator[Packed]:
    for key, scales in tensors.items():
        name = find_scaled_name(key)
        if name is None:
            continue
        values = _other_half(tensors, name, scales)
        if values.dtype != FP8 or len(values.shape) != 2:
            raise ValueError(
                f"{_where(values)} is {values.dtype} {list(values.shape)}: {key!r} holds its"
                f" scales, so it should be a matrix of {FP8}"
            )
        _check_scales(scales, FP8_SCALE_DTYPES, _num_blocks(values.shape, block), values)
        yield Packed(name, dtype, values.shape, values.chunks[0], scales.chunks[0], "fp8", block)


def _mxfp4(tensors: Mapping[str, StoredTensor], dtype: str) -> Iterator[Packed]:
    for key, half in tensors.items():
        if half.dtype != "uint8" or not key.endswith((_BLOCKS, _SCALES)):
            continue
        name = key.removesuffix(_BLOCKS).removesuffix(_SCALES)
        values, scales = (
            _other_half(tensors, name + suffix, half) for suffix in (_BLOCKS, _SCALES)
        )
        shape = values.shape
        if values.dtype != "uint8" or len(shape) != 4 or shape[-1] != MXFP4_GROUP_BYTES:
            raise ValueError(
                f"{_where(values)} is {values.dtype} {list(shape)}: should be uint8 [experts, rows,"
                f" groups of {MXFP4_GROUP} columns, {MXFP4_GROUP_BYTES}]"
            )
        _check_scales(scales, ("uint8",), shape[:3], values)
        whole = shape[0], shape[2] * MXFP4_GROUP, shape[1]
        yield Packed(
            name, dtype, whole, values.chunks[0], scales.chunks[0], "mxfp4", (1, MXFP4_GROUP)
        )


def _other_half(tensors: Mapping[str, StoredTensor], name: str, half: StoredTensor) -> StoredTensor:
    if name not in tensors:
        raise ValueError(f"{_where(half)} belongs to {name!r}, which the model lacks")
    return tensors[name]


def _check_scales(
    scales: StoredTensor, dtypes: tuple[str, ...], shape: Shape, values: StoredTensor
) -> None:
    if scales.dtype not in dtypes:
        raise ValueError(
            f"{_where(scales)} is {scales.dtype}: scales should be {' or '.join(dtypes)}"
        )
    if scales.shape != shape:
        raise ValueError(
            f"{_where(scales)} has shape {scales.shape}: the scales of {values.key!r}, of shape"
            f" {values.shape}, should have {shape}"
        )


def _num_blocks(shape: Shape, block: Shape) -> Shape:
    return tuple(-(-size // step) for size, step in zip(shape, block, strict=True))


def _where(tensor: StoredTensor) -> str:
    return tensor.chunks[0].where
