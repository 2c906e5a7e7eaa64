"""Rewrites a HuggingFace model: in FP8, with plain weights, without what sees images, or turned.

FP8 has scales of 128 x 128 blocks. Plain weights come from a quantized model (packed.py). Experts
are stacked the one way or the other:

published           gate_up_proj [experts, hidden, 2 * width]    down_proj [experts, width, hidden]
transformers 5      gate_up_proj [experts, 2 * width, hidden]    down_proj [experts, hidden, width]

The published files of Qwen3.5 have the second form, and transformers 5 saves each expert by itself.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch  # noqa: F401  (imported before the workers fork, so that they share its pages)

from checkpoint_tools.assembly import Assembly, Piece, join_pieces, whole
from checkpoint_tools.hf import open_hf, open_plain
from checkpoint_tools.hf_model import find_dtype, is_upright, list_singles, read_config
from checkpoint_tools.hf_output import make_hf
from checkpoint_tools.options import Effort
from checkpoint_tools.output import Made
from checkpoint_tools.packed import collect_stored_names, find_packed
from checkpoint_tools.produce import ConversionReport
from checkpoint_tools.staging import refuse_existing
from checkpoint_tools.stored import Chunk, StoredTensor
from mcore_rl.weights.hf.config import parse_hf_config, set_dtype, with_text_settings
from mcore_rl.weights.hf.folder import write_small_files
from mcore_rl.weights.hf.fp8 import QUANTIZATION_CONFIG, is_converted
from mcore_rl.weights.hf.int4 import TEXT, find_quantization, is_int4
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.deepseek import DEEPSEEK_V3
from mcore_rl.weights.models.moonvit import KIMI_K25, KIMI_VL, LANGUAGE
from mcore_rl.weights.models.qwen_vl import QWEN3_5_VL_MOE, QWEN3_VL_MOE
from mcore_rl.weights.models.settings import drop_quantization
from mcore_rl.weights.models.table import Shape
from mcore_rl.weights.models.value_head import find_stem

HALVES = ("bfloat16", "float16")
"""Tensors of these dtypes without scales are cast; float32 was a deliberate choice and is kept."""


def dequantize(
    source_hf: Path, out: Path, dtype: str, max_file_bytes: int, effort: Effort
) -> ConversionReport:
    """Write the model of `source_hf`, in block FP8, MXFP4 or INT4, to `out` in `dtype`.

    The architecture may be any. Raises ValueError with the file or tensor that is wrong, or with
    the kind of quantization if it is not supported.
    """
    refuse_existing(out)
    config = parse_hf_config(source_hf)
    file = source_hf / "config.json"
    if find_quantization(config) is None:
        raise ValueError(f"{file} has no quantization_config: the model is not quantized")
    checkpoint = open_plain(source_hf)
    packed = {}
    if not is_int4(config):
        packed = find_packed(config, checkpoint.tensors, dtype, file)
    halves = collect_stored_names(packed)
    assemblies: dict[str, Made] = {**packed}
    for name, tensor in checkpoint.tensors.items():
        if name not in halves:
            to = dtype if tensor.dtype in HALVES else tensor.dtype
            assemblies[name] = whole(tensor.chunks[0], dtype=to)
    settings = set_dtype(drop_quantization(config), dtype)
    describe = partial(write_small_files, config=settings, side_files_from=source_hf)
    return make_hf(out, [checkpoint], assemblies, frozenset(), describe, max_file_bytes, effort)


def turn_experts(
    source_hf: Path, out: Path, max_file_bytes: int, effort: Effort
) -> ConversionReport:
    """Write the model of `source_hf` to `out` with its experts in the other form.

    Those of Qwen3-VL are transposed each, to and fro; those of Qwen3.5 are stacked. Values stay bit
    for bit. Raises ValueError for another architecture, and with the file and tensor that is wrong.
    """
    refuse_existing(out)
    config = read_config(source_hf)
    family = family_of(config)
    stem = find_stem(family.architecture)
    if stem == find_stem(QWEN3_5_VL_MOE.architecture):
        return _stack_experts(source_hf, out, config, max_file_bytes, effort)
    if stem != find_stem(QWEN3_VL_MOE.architecture):
        raise ValueError(
            f"{source_hf}: {family.architecture} has one form of experts; only"
            f" {QWEN3_VL_MOE.architecture} and {QWEN3_5_VL_MOE.architecture} are saved in two"
        )
    reopen = partial(open_hf, either_way=True)
    checkpoint = reopen(source_hf)
    sizes = family.sizes(config)
    stacked = {
        tensor.name.format(layer=layer)
        for rule, tensor, layer, _ in family.places(config, sizes)
        if rule.stacked
    }
    assemblies: dict[str, Made] = {}
    for name, tensor in checkpoint.tensors.items():
        chunk = tensor.chunks[0]
        assemblies[name] = _turn(chunk) if name in stacked else whole(chunk)
    describe = partial(write_small_files, config=config, side_files_from=source_hf)
    kept = (frozenset[str](), describe, max_file_bytes, effort)
    return make_hf(out, [checkpoint], assemblies, *kept, reopen=reopen)


def _stack_experts(
    source_hf: Path, out: Path, config: dict[str, Any], max_file_bytes: int, effort: Effort
) -> ConversionReport:
    """Write a Qwen3.5 whose experts have a tensor each with those of a layer in one."""
    checkpoint = open_hf(source_hf, either_way=True)
    family = family_of(config)
    left = dict(checkpoint.tensors)
    assemblies: dict[str, Made] = {}
    for name, shape in family.shapes(config).items():
        if name not in left and is_upright(family, name):
            assemblies[name] = _stack(name, shape, left)
    if not assemblies:
        raise ValueError(f"{source_hf}: its experts are stacked already")
    assemblies |= {name: whole(tensor.chunks[0]) for name, tensor in left.items()}
    describe = partial(write_small_files, config=config, side_files_from=source_hf)
    kept = (frozenset[str](), describe, max_file_bytes, effort)
    return make_hf(out, [checkpoint], assemblies, *kept)


def _stack(name: str, shape: Shape, left: dict[str, StoredTensor]) -> Assembly:
    """Take the tensors of single experts out of `left`; return the assembly of the stacked one."""
    chunks: list[Chunk] = []
    for single, _, offset in list_singles(name, shape):
        chunk = left.pop(single).chunks[0]
        chunks.append(replace(chunk, offset=offset, shape=(1, *chunk.shape)))
    return join_pieces(name, chunks[0].dtype, shape, chunks)


def _turn(chunk: Chunk) -> Assembly:
    """Return the assembly of a tensor whose last two axes change places."""
    experts, rows, columns = chunk.shape
    size = rows * columns
    pieces = (
        Piece(chunk, number * size, number * size, columns, rows, rows, transposed=True)
        for number in range(experts)
    )
    return Assembly(chunk.key, chunk.dtype, (experts, columns, rows), tuple(pieces))


def take_text(source_hf: Path, out: Path, max_file_bytes: int, effort: Effort) -> ConversionReport:
    """Write the language model of a Kimi-K2.5 or Kimi-VL to `out`, as the DeepSeek-V3 that it is.

    Stored bytes stay as they are, also in INT4. Raises ValueError for another architecture, and
    with the file and tensor that is wrong.
    """
    refuse_existing(out)
    config = parse_hf_config(source_hf)
    architecture = family_of(read_config(source_hf)).architecture
    if architecture not in (KIMI_K25.architecture, KIMI_VL.architecture):
        raise ValueError(
            f"{source_hf}: only {KIMI_K25.architecture} and {KIMI_VL.architecture} have a language"
            f" model that is one of another family; this is {architecture}"
        )
    checkpoint = open_hf(source_hf)
    assemblies = {
        name.removeprefix(LANGUAGE): whole(tensor.chunks[0], name=name.removeprefix(LANGUAGE))
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(LANGUAGE)
    }
    settings = {
        **{key: value for key, value in config[TEXT].items() if key != "auto_map"},
        "architectures": [DEEPSEEK_V3.architecture],
        "model_type": "deepseek_v3",
        "dtype": find_dtype(with_text_settings(config), checkpoint.tensors),
    }
    describe = partial(write_small_files, config=settings, side_files_from=source_hf)
    kept = (frozenset[str](), describe, max_file_bytes, effort)
    return make_hf(out, [checkpoint], assemblies, *kept)


KEPT = ("eh_proj",)
"""Modules of multi-token prediction that DeepSeek's convention leaves as they are."""
SOURCE_DTYPES = ("bfloat16", "float16", "float32")


def to_fp8(source_hf: Path, out: Path, max_file_bytes: int, effort: Effort) -> ConversionReport:
    """Write the model of `source_hf` to `out` in DeepSeek's FP8; see mcore_rl/weights/hf/fp8.py.

    Raises ValueError with the file or tensor that is wrong, or if the model is quantized already.
    """
    refuse_existing(out)
    config = read_config(source_hf)
    if family_of(config).stacks_experts:
        raise ValueError(
            f"{source_hf}: this format has no place for experts that are stacked in one tensor"
        )
    checkpoint = open_plain(source_hf)
    left_out = family_of(config).find_left_out(config)
    assemblies = {
        name: whole(tensor.chunks[0])
        for name, tensor in checkpoint.tensors.items()
        if name not in left_out
    }
    quantized = frozenset(
        name
        for name, made in assemblies.items()
        if is_converted(name) and len(made.shape) == 2 and name.split(".")[-2] not in KEPT
    )
    for name in quantized:
        if assemblies[name].dtype not in SOURCE_DTYPES:
            raise ValueError(
                f"{checkpoint.tensors[name].chunks[0].where} is {assemblies[name].dtype} already"
            )
    settings = {**config, "quantization_config": QUANTIZATION_CONFIG}
    describe = partial(write_small_files, config=settings, side_files_from=source_hf)
    return make_hf(out, [checkpoint], assemblies, quantized, describe, max_file_bytes, effort)
