"""Writes a run's adapter in PEFT's format, and merges an adapter into its base: W = W0 + s B A.

    <run.dir>/checkpoints/step_...  --to-hf --lora--> PEFT's folder --merge-lora--> HuggingFace
                                    ------------------merge-lora------------------>  directory

A critic's checkpoint has its value head beside its factors, and becomes a critic's directory.

Peak memory: the factors, and the tensors of one file of the result.
"""

import io
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_tools.hf_model import find_dtype, read_config
from checkpoint_tools.options import show_bytes
from checkpoint_tools.staging import PARTIAL, refuse_existing
from checkpoint_tools.stored import Checkpoint, Chunk
from checkpoint_tools.torch_dist import is_torch_dist, open_torch_dist
from mcore_rl.process.disk import rename_whole
from mcore_rl.weights.box import Shard
from mcore_rl.weights.hf.checksums import ByteSpan, sum_ranges
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.files import (
    commit_export,
    load_into,
    make_empty_tensors,
    plan_export,
    write_carried,
    write_export_file,
)
from mcore_rl.weights.lora.base import compute_base_sum
from mcore_rl.weights.lora.facts import (
    FACTORS,
    AdapterFacts,
    describe_base_difference,
    read_adapters,
)
from mcore_rl.weights.lora.peft_files import (
    find_lost_in_transformers,
    is_peft,
    read_peft,
    write_peft,
)
from mcore_rl.weights.lora.product import add_product
from mcore_rl.weights.lora.targets import list_matrices
from mcore_rl.weights.lora.whole import check_factor_shapes
from mcore_rl.weights.models import hf_tensor_shapes
from mcore_rl.weights.models.value_head import SCORE, VALUE_HEAD, add_value_head

Factors = Mapping[str, Tensor]
"""Factors by "<HF tensor>.A" and "<HF tensor>.B"."""


@dataclass(frozen=True)
class _Adapter:
    """Factors to add to a base. `head`: the value head that takes the place of an output layer."""

    scale: float
    factors: Factors
    head: Tensor | None = None


def lora_to_peft(checkpoint: Path, source_hf: Path, out: Path, name: str = "") -> str:
    """Write the adapter of a run's checkpoint to `out`, as PEFT does; return a report.

    name   of one of several adapters that the run trained in turns

    Raises ValueError with the file or tensor that is wrong, or if `source_hf` is another base.
    """
    refuse_existing(out)
    config = read_config(source_hf, takes_fp8=True)
    facts, factors, head = _read_checkpoint(checkpoint, name)
    if head is not None:
        raise ValueError(
            f"{checkpoint} is a critic's, with a value head, for which an adapter of a language"
            " model has no place: mcore-rl-ckpt merge-lora writes the critic"
        )
    _refuse_other_base(checkpoint, facts.base, source_hf)
    staging = _make_staging(out)
    write_peft(staging, facts, config, factors)
    rename_whole(staging, out)
    num_bytes = sum(factor.nbytes for factor in factors.values())
    report = f"{out}: factors of {len(factors) // 2} matrices, {show_bytes(num_bytes)}"
    if lost := find_lost_in_transformers(config, {key[:-2] for key in factors}):
        report += (
            f"; transformers 5 with peft 0.21 drops those of {len(lost)} matrices outside of"
            f" experts, such as {min(lost)!r}: give it what mcore-rl-ckpt merge-lora makes"
        )
    return report


def merge_lora(
    adapter: Path,
    source_hf: Path,
    out: Path,
    dtype: str | None,
    max_file_bytes: int,
    name: str = "",
) -> str:
    """Write the weights of `source_hf` with an adapter's products added to `out`.

    adapter   a checkpoint of a run with LoRA, or a folder in PEFT's format
    dtype     of the result; None: that of the source
    name      of one of several adapters of the checkpoint
    Raises ValueError with the file or tensor that is wrong, or if `source_hf` is another base.
    """
    begun = time.monotonic()
    refuse_existing(out)
    read_config(source_hf, takes_fp8=True)
    source = facts = ModelFacts.read(source_hf)
    added = _read_any(adapter, facts, name)
    if added.head is not None:
        facts = ModelFacts(facts.path, add_value_head(facts.config))
    to = dtype or find_dtype(facts.config, {})
    files = plan_export(
        hf_tensor_shapes(facts.config), facts.family.dtypes(facts.config, to), 1, max_file_bytes
    )
    staging = _make_staging(out)
    sums = {}
    for file in files:
        tensors = make_empty_tensors(file.shards)
        _fill(tensors, file.shards, source, added)
        sums[file.filename] = write_export_file(staging, file, tensors)
    carried = write_carried(source_hf, staging, facts.config, max_file_bytes)
    commit_export(staging, files, facts.config, to, source_hf, carried, sums)
    rename_whole(staging, out)
    seconds = time.monotonic() - begun
    return f"{out}: {len(added.factors) // 2} matrices with factors merged in {seconds:.1f} s"


def _fill(
    tensors: Mapping[str, Tensor], shards: Sequence[Shard], source: ModelFacts, added: _Adapter
) -> None:
    """Set whole tensors to those of the source with what an adapter adds to them."""
    if added.head is not None and SCORE in tensors:
        tensors[SCORE].copy_(added.head)
        shards = [shard for shard in shards if shard.box.name != SCORE]
    load_into(shards, tensors, source)
    for name, weight in tensors.items():
        if f"{name}.A" in added.factors:
            first, second = added.factors[f"{name}.A"], added.factors[f"{name}.B"]
            add_product(weight, first, second, added.scale)


def _read_any(adapter: Path, base: ModelFacts, name: str) -> _Adapter:
    """Return an adapter that belongs to `base`."""
    if is_peft(adapter):
        if name:
            raise ValueError(f"--name {name}: {adapter} has one adapter; leave it out")
        peft = read_peft(adapter)
        if peft.base:
            _refuse_other_base(adapter, peft.base, base.path)
        _check_places(adapter, peft.shapes, peft.rank, base)
        with peft.open() as file:
            return _Adapter(peft.scale, {key: file.read(key) for key in peft.shapes})
    facts, factors, head = _read_checkpoint(adapter, name)
    _refuse_other_base(adapter, facts.base, base.path)
    shapes = {key: tuple(factor.shape) for key, factor in factors.items()}
    check_factor_shapes(shapes, facts.list_factor_shapes(base.config), adapter)
    return _Adapter(facts.scale, factors, head)


def _check_places(
    adapter: Path, found: Mapping[str, tuple[int, ...]], rank: int, base: ModelFacts
) -> None:
    """Raise ValueError unless all factors of a PEFT adapter belong to matrices of the base."""
    shapes = hf_tensor_shapes(base.config)
    wanted: dict[str, tuple[int, ...]] = {}
    names = {key[:-2] for key in found}
    for name in list_matrices(base.config):
        if name in names:
            wanted |= {f"{name}.A": (rank, shapes[name][1]), f"{name}.B": (shapes[name][0], rank)}
    check_factor_shapes(found, wanted, adapter)


def _refuse_other_base(adapter: Path, base: str, source_hf: Path) -> None:
    own = compute_base_sum(source_hf)
    if own != base:
        raise ValueError(describe_base_difference(str(adapter), base, own, str(source_hf)))


def _read_checkpoint(folder: Path, name: str) -> tuple[AdapterFacts, Factors, Tensor | None]:
    """Return facts, factors and a critic's value head of a run's checkpoint.

    Raises ValueError if it holds weights, or no adapter of that name, "" being that of an only one.
    """
    if not folder.is_dir() or not is_torch_dist(folder):
        raise ValueError(
            f"{folder} holds no adapter: name a checkpoint of a run with train.lora.rank, or a"
            " folder in PEFT's format"
        )
    adapters = read_adapters(folder)
    if not adapters:
        raise ValueError(
            f"{folder} holds all weights of a model, not an adapter: mcore-rl-ckpt to-hf without"
            " --lora writes them"
        )
    if name not in adapters:
        known = ", ".join(filter(None, adapters))
        remedy = f"give one of {known} with --name" if known else "leave out --name"
        wanted = f"no adapter {name!r}" if name else "several adapters"
        raise ValueError(f"{folder} holds {wanted}: {remedy}")
    checkpoint = open_torch_dist(folder)
    prefix = f"{FACTORS}{name}." if name else FACTORS
    factors = {}
    for key, tensor in checkpoint.tensors.items():
        if key.startswith(prefix):
            factors[key.removeprefix(prefix)] = _read_tensor(checkpoint, tensor.chunks)
    head = checkpoint.tensors.get(VALUE_HEAD)
    return adapters[name], factors, None if head is None else _read_tensor(checkpoint, head.chunks)


def _read_tensor(checkpoint: Checkpoint, chunks: tuple[Chunk, ...]) -> Tensor:
    """Return a tensor that lies in one piece, after comparing its checksum."""
    [chunk] = chunks
    path = Path(chunk.path)
    if checkpoint.sums is not None:
        stop = chunk.start + chunk.num_bytes
        [found] = sum_ranges(path, [(chunk.start, stop)])
        listed: dict[int, ByteSpan] = {s.start: s for s in checkpoint.sums[chunk.file].spans}
        if listed[chunk.start] != found:
            raise ValueError(f"{chunk.where} does not agree with checksums.json: it is damaged")
    with path.open("rb") as file:
        file.seek(chunk.start)
        content = io.BytesIO(file.read(chunk.num_bytes))
    return torch.load(content, map_location="cpu", weights_only=True)


def _make_staging(out: Path) -> Path:
    """Return an empty folder beside `out`, which is renamed once everything is written."""
    staging = out.with_name(out.name + PARTIAL)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging
