"""Saves model, optimizer and extra state to one folder per save, which any layout can load.

The folder is written by checkpoint_save.py. Before anything of it is loaded, checkpoint_check.py
checks it. If a load fails, or gives numbers that are not finite, the files are searched, and the
error names the file and the tensor.
"""

import io
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from mcore_rl.config import ParallelConfig
from mcore_rl.device import default_generators, device
from mcore_rl.process.disk import UnwritableError
from mcore_rl.train.checkpoint_check import (
    check_checkpoint,
    load_safely,
    only_safe_pickles,
    read_places_of,
)
from mcore_rl.train.checkpoint_save import Save, discard, start_save
from mcore_rl.train.lora.saved import check_saved_adapters
from mcore_rl.train.lora.turns import Learner, Turns
from mcore_rl.train.muon import MOMENTUM, MuonBesideAdam
from mcore_rl.train.optimizer import READABLE, STATE, Readable, load_optimizer, parts_of
from mcore_rl.train.runtime import rng_state, set_rng_state
from mcore_rl.train.storage import SHARED, Storage
from mcore_rl.weights.hf.files import count_not_finite
from mcore_rl.weights.lora.facts import FACTORS, FACTS, encode_adapters
from mcore_rl.weights.megatron_files.integrity import COPY_AGAIN
from mcore_rl.weights.megatron_files.metadata import READ_ERRORS, Place
from mcore_rl.weights.models.mtp import PREFIX, TRAINED
from mcore_rl.weights.models.table import HfConfig
from mcore_rl.weights.models.value_head import find_value_head

_MOVE_ASIDE = "move the checkpoint's folder aside, and the run continues from the one before"


@contextmanager
def name_damage(folder: Path) -> Iterator[None]:
    """Raise ValueError with file and tensor if the body fails to read a checkpoint that is damaged.

    Any other error passes through.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch has no type for bytes it cannot read
        fault = _find_damage(folder, _places(folder))
        if not fault:
            raise
        raise ValueError(f"{fault}: {COPY_AGAIN}") from error


def refuse_not_finite(loaded: Iterable[Tensor], folder: Path, step: int) -> None:
    """Raise ValueError on every rank if tensors that were loaded hold NaN; collective.

    The message has the step, the file and the tensor. Numbers that no file has, such as those of
    padding, pass.
    """
    has_bad = any(count_not_finite(tensor) for tensor in loaded)
    num_bad = torch.tensor([int(has_bad)], device=device())
    dist.all_reduce(num_bad)
    if num_bad.item() == 0:
        return
    own = _find_not_finite(folder, _places(folder)[dist.get_rank() :: dist.get_world_size()])
    found = [""] * dist.get_world_size()
    dist.all_gather_object(found, own)
    fault = next(filter(None, found), "")
    if fault:
        raise ValueError(f"step {step}: {fault}: {_MOVE_ASIDE}")


def _places(folder: Path) -> list[Place]:
    """Return the places of all tensors and objects, in the order of the files."""
    places = set(read_places_of(folder).values())
    return sorted(places, key=lambda place: (place.file, place.start, place.key))


def _read(folder: Path, place: Place) -> bytes:
    with (folder / place.file).open("rb") as file:
        file.seek(place.start)
        return file.read(place.num_bytes)


def _find_damage(folder: Path, places: Iterable[Place]) -> str:
    """Return the first file and tensor whose archive cannot be read, or ""."""
    for place in places:
        where = f"{folder / place.file}: {place.key!r}"
        try:
            content = _read(folder, place)
            if len(content) < place.num_bytes:
                end = place.start + place.num_bytes
                return f"{where} should end at byte {end}, after the end of the file: it was cut"
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                damaged = archive.testzip()
        except (*READ_ERRORS, OSError) as error:
            return f"{where} is damaged ({error})"
        if damaged is not None:
            return f"{where} is damaged: {damaged!r} in it does not agree with its checksum"
    return ""


def _find_not_finite(folder: Path, places: Iterable[Place]) -> str:
    """Return the first file and tensor with numbers that are not finite, or ""."""
    for place in places:
        where = f"{folder / place.file}: tensor {place.key!r}"
        value = load_safely(io.BytesIO(_read(folder, place)), where)
        if isinstance(value, Tensor) and (num_bad := count_not_finite(value)):
            return f"{where} has {num_bad} of {value.numel()} values that are not finite"
    return ""


@dataclass(frozen=True)
class TrainState:
    """The objects whose state a checkpoint holds, as they are on this rank.

    turns       all weights with their optimizer, or the adapters (train/lora) that are saved in the
                place of weights
    hf_config   config.json of the model
    """

    turns: Turns
    parallel: ParallelConfig
    hf_config: HfConfig


class Checkpointer:
    """Saves and loads checkpoints; every method is a collective over all ranks."""

    def __init__(self, state: TrainState, readable: Readable) -> None:
        """`readable` returns, for a tensor whose memory is moved out, its copy in host memory."""
        self._state = state
        self._readable = readable
        self.storage: Storage = SHARED
        self.failures: list[tuple[str, str]] | None = None
        """(folder, reason) of saves whose files cannot be written; None: such a save raises."""
        self._pending: Save | None = None

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Start to write the state. The folder counts after `finish` or the next save.

        State in device memory is copied to the host first. State that is moved out is written from
        host memory, which may change only after `wait_written`.

        extra   JSON-like values, the same on every rank
        Raises UnwritableError unless `failures` takes it; earlier checkpoints are not touched.
        """
        self.finish()
        sharded = _make_sharded_state(self._state, is_loading=False, readable=self._readable)
        turns = self._state.turns
        sharded |= {
            "rng": _rng_object(),
            "step": turns.step,
            "steps": turns.steps,
            "extra": extra,
            "layout": _layout(self._state.parallel),
        }
        texts = {FACTS: encode_adapters(turns.facts)} if turns.facts else {}
        with self._collect_failure(folder):
            self._pending = start_save(sharded, folder, self._readable, self.storage, texts)

    def finish(self, timeout_s: float = 600.0) -> None:
        """Wait for the save under way, if any, and make its folder count.

        Raises TimeoutError after `timeout_s`, or the error of a writer, which names its file; an
        UnwritableError only if `failures` does not take it.
        """
        if self._pending is not None:
            pending = self._pending
            self._pending = None
            with self._collect_failure(pending.folder):
                pending.finish(timeout_s)

    @contextmanager
    def _collect_failure(self, folder: Path) -> Iterator[None]:
        """Add to `failures` a save that cannot be written, whose files are removed; a collective.

        Every rank raises in the block or none does.
        """
        try:
            yield
        except UnwritableError as error:
            if self.failures is None:
                raise
            discard(folder, self.storage)
            self.failures.append((str(folder), str(error)))

    def wait_written(self, timeout_s: float = 600.0) -> None:
        """Wait until this rank has written its part of the save under way; not a collective.

        Raises TimeoutError after `timeout_s`.
        """
        if self._pending is not None:
            self._pending.wait_written(timeout_s)

    def maybe_finish(self) -> None:
        """Finish the save under way if all ranks have written their part."""
        if self._pending is None:
            return
        num_writing = torch.tensor([int(self._pending.is_writing())], device=device())
        dist.all_reduce(num_writing)
        if num_writing.item() == 0:
            self.finish()

    def load(self, folder: Path, *, verify: bool = True) -> dict[str, Any]:
        """Restore model, optimizers and steps, in the saved layout also generators; return extra.

        verify   first compare every byte with checksums.json
        Raises ValueError if `folder` is not a complete checkpoint, is damaged, names code to run,
        has NaN in it, or has the state of another optimizer or another adapter than this run's.
        """
        here = self.storage.fetch(folder)
        if not (here / "metadata.json").is_file():
            raise ValueError(f"{folder} is not a complete checkpoint: choose another step's folder")
        check_checkpoint(here, verify=verify)
        turns = self._state.turns
        check_saved_adapters(folder, here, turns.facts, self._state.hf_config)
        _check_mtp(folder, here, self._state.hf_config)
        _check_optimizer(folder, here, turns.chosen.optimizer)
        with only_safe_pickles(), name_damage(here):
            loaded = self._load(here)
        refuse_not_finite(tensors_in(loaded), here, loaded["step"])
        dist.barrier()
        self.storage.leave(here)
        turns.count_from(loaded.get("steps", {"": loaded["step"]}))
        return loaded["extra"]

    def _load(self, folder: Path) -> dict[str, Any]:
        """Return what was loaded, by the names of `save`."""
        state = self._state
        common = dist_checkpointing.load_common_state_dict(str(folder))
        same_layout = common["layout"] == _layout(state.parallel)
        sharded = _make_sharded_state(state, is_loading=True)
        if same_layout:
            sharded["rng"] = _rng_object()
        has_optimizer = any(map(_is_optimizer, common))
        if not has_optimizer:
            sharded = {name: own for name, own in sharded.items() if not _is_optimizer(name)}
        loaded = dist_checkpointing.load(sharded, str(folder))
        for learner in state.turns.visit():
            _load_learner(learner, loaded, state, has_optimizer=has_optimizer)
        if same_layout:
            set_rng_state(loaded["rng"], default_generators())
        return loaded


def _load_learner(
    learner: Learner, loaded: Mapping[str, Any], state: TrainState, *, has_optimizer: bool
) -> None:
    """Put what was loaded into the chunks, and into the optimizer if its state was saved."""
    for name, chunk in _name_chunks(learner.chunks):
        entry = loaded[_name_entry(name, learner)]
        is_whole = learner.adapter is None
        found = unwrap_model(chunk).load_state_dict(entry, strict=is_whole)
        assert not any(_is_beside_frozen(key, state) for key in found.missing_keys), found
    with torch.no_grad():
        if has_optimizer:
            load_optimizer(learner.optimizer, loaded[_name_entry("optimizer", learner)])
        else:  # a model alone, as mcore-rl-ckpt from-hf writes it
            learner.optimizer.reload_model_params()


def _check_mtp(folder: Path, here: Path, hf_config: HfConfig) -> None:
    """Raise ValueError if layers for multi-token prediction are trained in one of both alone.

    `here` is the local copy that is read; messages name `folder`.
    """
    is_saved = any(key.startswith(PREFIX) for key, _ in read_places_of(here))
    if is_saved != (TRAINED in hf_config):
        has, value = ("has", "above 0") if is_saved else ("has no", "to 0.0")
        raise ValueError(
            f"{folder} {has} trained layers for multi-token prediction: set train.mtp_loss {value},"
            " or start a run with model.path of an exported model"
        )


def _check_optimizer(folder: Path, here: Path, optimizer: MegatronOptimizer) -> None:
    """Raise ValueError if the checkpoint holds the state of another optimizer than this run's.

    `here` is the local copy that is read; messages name `folder`.
    """
    keys = {key for key, _ in read_places_of(here)}
    if not any(key.startswith(STATE) for key in keys):
        return
    kinds = {key.removeprefix(STATE).split(".")[0] for key in keys if key.startswith(STATE)}
    saved = "muon" if MOMENTUM in kinds else "adam" if "exp_avg_sq" in kinds else "lion"
    parts = parts_of(optimizer)
    has_muon = any(isinstance(part.optimizer, MuonBesideAdam) for part in parts)
    own = "muon" if has_muon else parts[0].config.optimizer
    if saved != own:
        raise ValueError(
            f"{folder} has the state of optimizer.name={saved}, and this run's is {own}: the state"
            f" of one is of no use to the other; set the model's optimizer.name={saved}, or start a"
            " run with model.path of an exported model"
        )


def tensors_in(loaded: dict[str, Any]) -> Iterator[Tensor]:
    """Yield all tensors of a nested state."""
    return (value for value in nested_values(loaded) if isinstance(value, Tensor))


def _name_chunks(chunks: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """Pair each chunk with its name in a checkpoint; only several chunks are numbered."""
    if len(chunks) == 1:
        return [("model", chunks[0])]
    return [(f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def _is_optimizer(name: str) -> bool:
    """Return whether `_name_entry` gave an optimizer's state this name."""
    return name.partition(".")[0] == "optimizer"


def _name_entry(name: str, learner: Learner) -> str:
    """Return the name of a part of the state of one of several adapters, or of the only one."""
    return f"{name}.{learner.name}" if learner.name else name


def _make_sharded_state(
    state: TrainState, *, is_loading: bool, readable: Readable | None = None
) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    of_optimizer = metadata if readable is None else {**metadata, READABLE: readable}
    sharded: dict[str, Any] = {}
    for number, learner in enumerate(state.turns.visit()):
        own = {
            name: _shard_chunk(unwrap_model(chunk), metadata, state, with_buffers=number == 0)
            for name, chunk in _name_chunks(learner.chunks)
        }
        own["optimizer"] = learner.optimizer.sharded_state_dict(
            own, is_loading=is_loading, metadata=of_optimizer
        )
        sharded |= {_name_entry(name, learner): entry for name, entry in own.items()}
    return sharded


def _shard_chunk(
    model: torch.nn.Module, metadata: dict[str, Any], state: TrainState, *, with_buffers: bool
) -> dict[str, Any]:
    """Return the chunk's sharded state; under an adapter what is trained, and buffers, alone.

    with_buffers   False: another adapter's part of the state has them
    """
    sharded = model.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
    if not state.turns.facts:
        return sharded
    buffers = {name for name, _ in model.named_buffers() if with_buffers}
    return {
        name: entry
        for name, entry in sharded.items()
        if name in buffers or _is_beside_frozen(name, state)
    }


def _is_beside_frozen(name: str, state: TrainState) -> bool:
    """Return whether a parameter is trained under an adapter: factors, or a critic's value head."""
    return name.startswith(FACTORS) or name == find_value_head(state.hf_config)


def _rng_object() -> ShardedObject:
    state = rng_state(default_generators())
    return ShardedObject("rng", state, (dist.get_world_size(),), (dist.get_rank(),))


def _layout(parallel: ParallelConfig) -> dict[str, Any]:
    names = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp_size")
    return {name: getattr(parallel, name) for name in names}
