"""Writes a quantized HuggingFace model anew with plain weights; see packed.py."""

from functools import partial
from pathlib import Path

import torch  # noqa: F401  (imported before the workers fork, so that they share its pages)

from checkpoint_tools.assembly import whole
from checkpoint_tools.hf import open_hf
from checkpoint_tools.hf_output import make_hf
from checkpoint_tools.options import Effort
from checkpoint_tools.output import Made
from checkpoint_tools.packed import find_packed, list_stored_names
from checkpoint_tools.produce import ConversionReport
from checkpoint_tools.staging import refuse_existing
from mcore_rl.weights.hf.config import parse_hf_config, with_dtype
from mcore_rl.weights.hf.folder import write_small_files
from mcore_rl.weights.models.settings import unquantized

HALVES = ("bfloat16", "float16")
"""Tensors of these dtypes without scales are cast; float32 was a deliberate choice and is kept."""


def dequantize(
    source_hf: Path, out: Path, dtype: str, max_file_bytes: int, effort: Effort
) -> ConversionReport:
    """Write the model of `source_hf`, in block FP8 or MXFP4, to `out` in `dtype`.

    The architecture may be any. Raises ValueError with the file or tensor that is wrong, or with
    the kind of quantization if it is not supported.
    """
    refuse_existing(out)
    config = parse_hf_config(source_hf)
    file = source_hf / "config.json"
    if config.get("quantization_config") is None:
        raise ValueError(f"{file} has no quantization_config: the model is not quantized")
    checkpoint = open_hf(source_hf)
    packed = find_packed(config, checkpoint.tensors, dtype, file)
    halves = list_stored_names(packed)
    assemblies: dict[str, Made] = {**packed}
    for name, tensor in checkpoint.tensors.items():
        if name not in halves:
            to = dtype if tensor.dtype in HALVES else tensor.dtype
            assemblies[name] = whole(tensor.chunks[0], dtype=to)
    settings = with_dtype(unquantized(config), dtype)
    describe = partial(write_small_files, config=settings, side_files_from=source_hf)
    return make_hf(out, [checkpoint], assemblies, frozenset(), describe, max_file_bytes, effort)
