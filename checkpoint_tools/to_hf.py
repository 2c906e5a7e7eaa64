"""Megatron distributed checkpoint in, HuggingFace directory out; from one to the other, tensor by tensor."""

from functools import partial
from pathlib import Path

from checkpoint_tools.assembly import Assembly, whole
from checkpoint_tools.hf import open_hf, read_index
from checkpoint_tools.hf_model import read_config, with_dtype
from checkpoint_tools.hf_output import make_hf
from checkpoint_tools.megatron_model import config_of, hf_assemblies
from checkpoint_tools.optimizer import optimizer_to_hf
from checkpoint_tools.options import Effort
from checkpoint_tools.produce import Report
from checkpoint_tools.staging import refuse_existing
from checkpoint_tools.stored import Checkpoint
from checkpoint_tools.torch_dist import model_tensors, open_torch_dist
from mcore_rl.slices.families import family_of
from mcore_rl.slices.families.table import HfConfig
from mcore_rl.slices.hf.folder import write_small_files


def to_hf(
    checkpoint: Path,
    source_hf: Path,
    out: Path,
    dtype: str | None,
    optimizer: Path | None,
    max_file_bytes: int,
    effort: Effort,
) -> list[Report]:
    """Merge the model of `checkpoint` into `out`, and the state of its optimizer into `optimizer`, if given.

    source_hf   the HuggingFace directory that the run began from: config.json, tokenizer, carried tensors
    dtype       of the model; by default as stored
    ValueError names the file or tensor that is wrong.
    """
    refuse_existing(out)
    if optimizer is not None:
        refuse_existing(optimizer)
    config = read_config(source_hf)
    source = open_torch_dist(checkpoint)
    tensors = {tensor.key: tensor for tensor in model_tensors(source)}
    config = config_of(tensors, config)
    assemblies = hf_assemblies(tensors.values(), config, dtype, checkpoint)
    carried = _carried(source_hf, config)
    sources = [source, *([carried[0]] if carried else [])]
    assemblies |= carried[1] if carried else {}
    settings = with_dtype(config, dtype or assemblies["model.embed_tokens.weight"].dtype)
    describe = partial(write_small_files, config=settings, side_files_from=source_hf)
    reports = [make_hf(out, sources, assemblies, frozenset(), describe, max_file_bytes, effort)]
    if optimizer is not None:
        reports.append(optimizer_to_hf(source, config, optimizer, max_file_bytes, effort))
    return reports


def _carried(source_hf: Path, config: HfConfig) -> tuple[Checkpoint, dict[str, Assembly]] | None:
    """Tensors that the directory has beside the model, such as layers for multi-token prediction."""
    family = family_of(config)
    if not family.carried(config) or not has_weights(source_hf):
        return None
    checkpoint = open_hf(source_hf)
    return checkpoint, {
        name: whole(tensor.chunks[0])
        for name, tensor in checkpoint.tensors.items()
        if family.is_carried(config, name)
    }


def has_weights(folder: Path) -> bool:
    return read_index(folder) is not None or any(folder.glob("*.safetensors"))
