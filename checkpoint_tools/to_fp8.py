"""HuggingFace directory in, the same with its matrices as 8-bit values and scales of 128 x 128 blocks out."""

from functools import partial
from pathlib import Path

from checkpoint_tools.assembly import whole
from checkpoint_tools.hf import open_hf
from checkpoint_tools.hf_model import read_config
from checkpoint_tools.hf_output import make_hf
from checkpoint_tools.options import Effort
from checkpoint_tools.produce import Report
from checkpoint_tools.staging import refuse_existing
from mcore_rl.slices.families import family_of
from mcore_rl.slices.hf.folder import write_small_files
from mcore_rl.slices.hf.fp8 import QUANTIZATION_CONFIG, is_converted

KEPT = ("eh_proj",)
"""Modules of multi-token prediction that are not quantized by DeepSeek's convention, whatever their name."""
SOURCE_DTYPES = ("bfloat16", "float16", "float32")


def to_fp8(source_hf: Path, out: Path, max_file_bytes: int, effort: Effort) -> Report:
    """Quantize the model of `source_hf` as DeepSeek publishes it (see mcore_rl/slices/hf/fp8.py) into `out`.

    ValueError names the file or tensor that is wrong; a model that is quantized already is refused.
    """
    refuse_existing(out)
    config = read_config(source_hf)
    if family_of(config).stacks_experts:
        raise ValueError(
            f"{source_hf}: experts that are stacked in one tensor have no place in this format: not supported"
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
