"""Writes a HuggingFace model anew in FP8 with scales of 128 x 128 blocks."""

from functools import partial
from pathlib import Path

from checkpoint_tools.assembly import whole
from checkpoint_tools.hf import open_hf
from checkpoint_tools.hf_model import read_config
from checkpoint_tools.hf_output import make_hf
from checkpoint_tools.options import Effort
from checkpoint_tools.produce import ConversionReport
from checkpoint_tools.staging import refuse_existing
from mcore_rl.weights.hf.folder import write_small_files
from mcore_rl.weights.hf.fp8 import QUANTIZATION_CONFIG, is_converted
from mcore_rl.weights.models import family_of

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
    checkpoint = open_hf(source_hf)
    left_out = family_of(config).left_out(config)
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
