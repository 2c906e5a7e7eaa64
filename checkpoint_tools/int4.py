"""Finds the matrices that INT4 words, scales and shapes encode, without torch.

    X.weight_packed, X.weight_scale, X.weight_shape  -->  X.weight: a chunk of words with scales

reader.py decodes such a chunk as it reads it. The format is that of mcore_rl/weights/hf/int4.py.
"""

from collections.abc import Mapping
from dataclasses import replace

from checkpoint_tools.stored import StoredTensor
from mcore_rl.weights.hf.int4 import (
    GROUP,
    PACKED_DTYPE,
    PER_WORD,
    find_int4_names,
    list_part_names,
)

SCALE_DTYPES = ("bfloat16", "float16", "float32")
SHAPE_DTYPES = ("int32", "int64")


def unpack_names(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a directory with INT4 matrices under their names without packing.

    Raises ValueError with file and tensor for parts that are missing or do not fit each other.
    """
    names = find_int4_names(tensors)
    parts = {part for name in names for part in list_part_names(name)}
    plain = {name: tensor for name, tensor in tensors.items() if name not in parts}
    for name in names:
        if name in plain:
            raise ValueError(f"{plain[name].chunks[0].where} is stored twice, also as INT4")
        plain[name] = _join(name, tensors)
    return plain


def _join(name: str, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    words, scales, shape = (_find(tensors, part, name) for part in list_part_names(name))
    where = words.chunks[0].where
    if words.dtype != PACKED_DTYPE or len(words.shape) != 2:
        raise ValueError(
            f"{where} is {words.dtype} {list(words.shape)}: words of INT4 values should be a matrix"
            f" of {PACKED_DTYPE}"
        )
    rows, columns = words.shape[0], words.shape[1] * PER_WORD
    if columns % GROUP or scales.shape != (rows, columns // GROUP):
        raise ValueError(
            f"{where} has shape {words.shape}, its scales have {scales.shape}: each row should be"
            f" whole groups of {GROUP} values, with a scale for each"
        )
    if scales.dtype not in SCALE_DTYPES:
        raise ValueError(
            f"{scales.chunks[0].where} is {scales.dtype}: scales should be"
            f" {' or '.join(SCALE_DTYPES)}"
        )
    if shape.dtype not in SHAPE_DTYPES or shape.shape != (2,):
        raise ValueError(f"{shape.chunks[0].where} should be two whole numbers, rows and columns")
    chunk = replace(
        words.chunks[0],
        key=name,
        dtype=scales.dtype,
        shape=(rows, columns),
        scales=scales.chunks[0],
    )
    return StoredTensor(name, scales.dtype, chunk.shape, (chunk,))


def _find(tensors: Mapping[str, StoredTensor], part: str, name: str) -> StoredTensor:
    if part not in tensors:
        packed = tensors[list_part_names(name)[0]].chunks[0].where
        raise ValueError(f"{packed} needs {part!r}, which is missing")
    return tensors[part]
