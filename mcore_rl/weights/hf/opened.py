"""Opens a HuggingFace directory: finds the file of every tensor, and checks names and shapes.

    config.json --the family's table--> names, shapes   <--compared-->   headers of *.safetensors

A model whose config.json ties the output layer to the embeddings, but whose files don't, is
refused: transformers (5.19, PreTrainedModel.tie_weights) compares the two if both are stored. It
ties them if they are equal, otherwise it warns and uses the stored output layer, against
config.json.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from mcore_rl.process.disk import check_readable
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.folder import check_header, list_checkpoint_files
from mcore_rl.weights.hf.fp8 import count_blocks, find_scaled_name, make_scale_name
from mcore_rl.weights.hf.int4 import (
    GROUP,
    PACKED,
    PER_WORD,
    SCALE,
    SHAPE,
    find_int4_names,
    list_part_names,
    split_part,
)
from mcore_rl.weights.hf.packing import Packing
from mcore_rl.weights.hf.tied_head import refuse_untied_head
from mcore_rl.weights.models.settings import DEQUANTIZE_REMEDY
from mcore_rl.weights.models.table import Shape

PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")
"""The dtypes that weights can be loaded from, by their safetensors names."""
_FP8 = "F8_E4M3"
_SCALE_DTYPES = ("F32", "BF16", "F16")
"""The dtypes that scales of FP8 blocks can be read from."""


def open_hf_dir(model: ModelFacts) -> dict[str, Path]:
    """Return HF name -> file of every tensor, after checking all names and shapes.

    The parts of an INT4 matrix and the scales of an FP8 one are listed, too, and an INT4 matrix
    itself in the file of its words. Raises ValueError naming the file, the tensor and the remedy
    for a tensor that config.json does not expect, that is missing, or that has another shape.
    """
    config = model.config
    family = model.family
    expected = family.shapes(config)
    files = list_checkpoint_files(model.path)
    file_of: dict[str, Path] = {}
    tied: dict[str, Path] = {}
    in_fp8: set[str] = set()
    for path in files:
        check_readable(path)  # safetensors says that such a file does not exist
        check_header(path)
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if name in family.find_left_out(config):
                    tied[name] = path
                    continue
                if family.is_carried(config, name):
                    continue
                stored = file.get_slice(name)
                if model.packing == "int4" and split_part(name):
                    _note_part(path, name, stored, expected, file_of)
                    continue
                if model.packing == "fp8" and find_scaled_name(name):
                    _note_scales(path, name, stored, expected, file_of)
                    continue
                is_fp8 = model.packing == "fp8" and stored.get_dtype() == _FP8
                if not is_fp8:
                    _check_dtype(path, name, stored.get_dtype())
                _check_tensor(path, name, tuple(stored.get_shape()), expected, file_of)
                file_of[name] = path
                in_fp8 |= {name} if is_fp8 else set()
    refuse_untied_head(file_of | tied, config)
    missing = sorted((expected.keys() | _list_parts(file_of, in_fp8)) - file_of.keys())
    if missing:
        raise ValueError(
            f"{model.path} lacks {len(missing)} of {len(expected)} tensors, the first is"
            f" {missing[0]!r}: download the checkpoint again, or correct config.json"
            f" (files read: {[path.name for path in files]})"
        )
    return file_of


def _note_part(
    path: Path, name: str, stored: Any, expected: Mapping[str, Shape], file_of: dict[str, Path]
) -> None:
    """Enter a part of an INT4 matrix under its own name, and the words under the matrix' as well.

    Raises ValueError naming file and tensor for another dtype or shape than the matrix needs.
    """
    part = split_part(name)
    assert part is not None, name
    matrix, suffix = part
    rows, columns = expected.get(matrix, (0, 0))
    shapes = {
        PACKED: (rows, columns // PER_WORD),
        SCALE: (rows, columns // GROUP),
        SHAPE: (2,),
    }
    dtypes = {PACKED: ("I32",), SCALE: PLAIN_DTYPES, SHAPE: ("I32", "I64")}[suffix]
    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    if dtype not in dtypes or columns % GROUP:
        raise ValueError(
            f"{path}: tensor {name!r} is {dtype}, of a matrix of {columns} columns: INT4 weights"
            f" need {' or '.join(dtypes)} here, and groups of {GROUP} columns"
        )
    wanted = {name: shapes[suffix]} if matrix in expected else {}
    _check_tensor(path, name, shape, wanted, file_of)
    file_of[name] = path
    if suffix == PACKED:
        _check_tensor(path, matrix, (rows, columns), expected, file_of)
        file_of[matrix] = path


def _note_scales(
    path: Path, name: str, stored: Any, expected: Mapping[str, Shape], file_of: dict[str, Path]
) -> None:
    """Enter the scales of an FP8 matrix.

    Raises ValueError naming file and tensor for another dtype or shape than the matrix needs.
    """
    matrix = find_scaled_name(name)
    assert matrix is not None, name
    if stored.get_dtype() not in _SCALE_DTYPES:
        raise ValueError(
            f"{path}: tensor {name!r} is {stored.get_dtype()}: scales of FP8 weights are read in"
            f" {' or '.join(_SCALE_DTYPES)}; {DEQUANTIZE_REMEDY}"
        )
    wanted = {name: tuple(map(count_blocks, expected[matrix]))} if matrix in expected else {}
    _check_tensor(path, name, tuple(stored.get_shape()), wanted, file_of)
    file_of[name] = path


def _list_parts(file_of: Mapping[str, Path], in_fp8: Collection[str]) -> set[str]:
    """Return the names of all parts of packed matrices, also of parts that are missing.

    Raises ValueError naming file and tensor for scales of plain values.
    """
    for name, path in file_of.items():
        matrix = find_scaled_name(name)
        if matrix in file_of and matrix not in in_fp8:
            raise ValueError(
                f"{path}: tensor {name!r} holds scales of {matrix!r}, which is not in 8-bit values"
                " (float8_e4m3fn): download the checkpoint again"
            )
    parts = filter(None, map(split_part, file_of))
    return {part for matrix, _ in parts for part in list_part_names(matrix)} | {
        make_scale_name(name) for name in in_fp8
    }


def list_packed(packing: Packing, file_of: Mapping[str, Path]) -> frozenset[str]:
    """Return the HF names of the matrices that are packed, of what `open_hf_dir` returned."""
    if packing == "plain":
        return frozenset()
    if packing == "int4":
        return frozenset(find_int4_names(file_of))
    return frozenset(filter(None, map(find_scaled_name, file_of)))


def _check_dtype(path: Path, name: str, dtype: str) -> None:
    """Raise ValueError for quantized values, which a cast without their scales would distort."""
    if dtype not in PLAIN_DTYPES or find_scaled_name(name):
        problem = f"is {dtype}" if dtype not in PLAIN_DTYPES else "holds scales of 8-bit values"
        raise ValueError(
            f"{path}: tensor {name!r} {problem}, so the model is quantized: {DEQUANTIZE_REMEDY}"
        )


SINGLE_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(?:gate|up|down)_proj\.weight")


def _check_tensor(
    path: Path, name: str, shape: Shape, expected: Mapping[str, Shape], file_of: Mapping[str, Path]
) -> None:
    """Raise ValueError unless the tensor is expected, well shaped and in no earlier file."""
    if name not in expected:
        remedy = "remove it, or correct config.json"
        if (single := SINGLE_EXPERT.fullmatch(name)) and f"{single[1]}.down_proj" in expected:
            remedy = (
                "each expert lies by itself, as transformers saves Qwen3.5; write the published"
                " form with mcore-rl-ckpt turn-experts"
            )
        raise ValueError(
            f"{path}: tensor {name!r} has no place in the model that config.json describes:"
            f" {remedy}"
        )
    if name in file_of:
        raise ValueError(
            f"{path}: tensor {name!r} is also in {file_of[name].name}: remove one of the two"
        )
    if shape != expected[name]:
        remedy = "config.json or the file belongs to another model"
        if len(shape) == 3 and (shape[0], *shape[:0:-1]) == expected[name]:
            remedy = (
                "each expert lies transposed, as transformers saves Qwen3-VL; write the published"
                " form with mcore-rl-ckpt turn-experts"
            )
        raise ValueError(
            f"{path}: tensor {name!r} has shape {shape}, by config.json it should be"
            f" {expected[name]}: {remedy}"
        )
