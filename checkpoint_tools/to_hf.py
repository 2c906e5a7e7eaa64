"""Merges a Megatron distributed checkpoint into a HuggingFace directory, tensor by tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from checkpoint_tools.assembly import whole
from checkpoint_tools.foreign_keys import drop_tensors
from checkpoint_tools.hf import open_hf, open_plain, read_index
from checkpoint_tools.hf_model import read_config
from checkpoint_tools.hf_output import make_hf
from checkpoint_tools.megatron_model import choose_config, hf_assemblies
from checkpoint_tools.optimizer import optimizer_to_hf
from checkpoint_tools.options import Effort
from checkpoint_tools.output import Made
from checkpoint_tools.packed import Packed, collect_stored_names, find_packed
from checkpoint_tools.produce import ConversionReport
from checkpoint_tools.staging import refuse_existing
from checkpoint_tools.stored import Checkpoint, Chunk
from checkpoint_tools.torch_dist import model_tensors, open_torch_dist
from mcore_rl.weights.hf.config import (
    parse_hf_config,
    set_dtype,
    with_text_settings,
    without_trained_mtp,
)
from mcore_rl.weights.hf.folder import write_small_files
from mcore_rl.weights.hf.int4 import SHAPE
from mcore_rl.weights.hf.packing import find_packing
from mcore_rl.weights.lora.facts import read_adapters
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.settings import put_quantization_back
from mcore_rl.weights.models.table import HfConfig


def to_hf(
    checkpoint: Path,
    source_hf: Path,
    out: Path,
    dtype: str | None,
    optimizer: Path | None,
    max_file_bytes: int,
    effort: Effort,
    leave_out: Sequence[str] = (),
    int4: bool = False,
) -> list[ConversionReport]:
    """Merge the model of `checkpoint` into `out`, and its optimizer's state into `optimizer`, if
    given.

    source_hf   directory the run began from, for config.json, tokenizer and untrained tensors
    dtype       of the model; None: as stored
    leave_out   shell patterns of Megatron's keys that are not merged
    int4        write in INT4 the matrices that `source_hf` has in INT4, and its words and scales
                where groups did not change
    Returns a report per folder written. Raises ValueError with the file or tensor that is wrong.
    """
    refuse_existing(out)
    if optimizer is not None:
        refuse_existing(optimizer)
    config = read_config(source_hf, takes_fp8=True)
    _refuse_factors(checkpoint)
    [source] = drop_tensors([open_torch_dist(checkpoint)], leave_out)
    tensors = {tensor.key: tensor for tensor in model_tensors(source)}
    config = choose_config(tensors, config)
    packed = _find_int4(source_hf, dtype) if int4 else {}
    if packed:
        dtype = next(iter(packed.values())).dtype
    assemblies: dict[str, Made] = {**hf_assemblies(tensors.values(), config, dtype, checkpoint)}
    sources = [source]
    if packed or (family_of(config).carried(config) and has_weights(source_hf)):
        untrained = open_hf(source_hf) if packed else open_plain(source_hf)
        sources.append(untrained)
        assemblies |= _list_carried(untrained, config, assemblies, dtype)
        shapes = {name + SHAPE for name in packed}
        assemblies |= {name: whole(untrained.tensors[name].chunks[0]) for name in shapes}
    plain = without_trained_mtp(config)
    settings = set_dtype(plain, dtype or assemblies[family_of(config).embedding].dtype)
    if packed:
        settings = put_quantization_back(settings, parse_hf_config(source_hf))
    describe = partial(write_small_files, config=settings, side_files_from=source_hf)
    kept = (frozenset[str](), describe, max_file_bytes, effort)
    reports = [make_hf(out, sources, assemblies, *kept, int4=packed)]
    if optimizer is not None:
        reports.append(optimizer_to_hf(source, config, optimizer, max_file_bytes, effort))
    return reports


def _refuse_factors(checkpoint: Path) -> None:
    if read_adapters(checkpoint):
        raise ValueError(
            f"{checkpoint} holds low-rank factors and no weights: mcore-rl-ckpt merge-lora adds"
            " them to their base, and to-hf --lora writes them alone"
        )


def _find_int4(source_hf: Path, dtype: str | None) -> dict[str, Chunk]:
    """Return the chunks of the matrices that `source_hf` has in INT4, by name.

    Raises ValueError if it has none, or has them in another dtype than `dtype`.
    """
    tensors = open_plain(source_hf).tensors
    packed = {name: tensor.chunks[0] for name, tensor in tensors.items() if tensor.chunks[0].scales}
    if not packed:
        raise ValueError(
            f"{source_hf} has no INT4 weights, which --int4 writes as they are there: leave out"
            " --int4, or name the directory of the INT4 model with --source-hf"
        )
    stored = {chunk.dtype for chunk in packed.values()}
    if len(stored) > 1 or dtype not in (None, *stored):
        raise ValueError(
            f"--int4 with --dtype {dtype}: the scales of {source_hf} are in"
            f" {' and '.join(sorted(stored))}, and so is the rest of the model; leave out --dtype"
        )
    return packed


def _list_carried(
    checkpoint: Checkpoint, config: HfConfig, merged: Mapping[str, Made], dtype: str | None
) -> dict[str, Made]:
    """Return the tensors that Megatron does not train, such as multi-token prediction layers.

    Those that the directory has as a copy of another are taken from `merged`; those that it has in
    FP8 are decoded, to `dtype` or else bfloat16.
    """
    decoded = _find_fp8(checkpoint, dtype or "bfloat16")
    halves = collect_stored_names(decoded)
    family = family_of(config)
    copies = family.copies(config)
    left_out = family.find_left_out(config)
    carried: dict[str, Made] = {}
    for name, tensor in checkpoint.tensors.items():
        if not family.is_carried(config, name):
            continue
        original = copies.get(name)
        if name in halves:
            carried |= {name: decoded[name]} if name in decoded else {}
        elif original is None:
            carried[name] = whole(tensor.chunks[0])
        else:
            original = family.tied[original] if original in left_out else original
            carried[name] = replace(merged[original], name=name)
    return carried


def _find_fp8(checkpoint: Checkpoint, dtype: str) -> dict[str, Packed]:
    """Return the matrices that a directory has in block FP8, by name."""
    config = with_text_settings(parse_hf_config(checkpoint.folder))
    if find_packing(config) != "fp8":
        return {}
    return find_packed(config, checkpoint.tensors, dtype, checkpoint.folder / "config.json")


def has_weights(folder: Path) -> bool:
    """Return True if a directory has weights beside its config.json."""
    return read_index(folder) is not None or any(folder.glob("*.safetensors"))
