"""Converts Adam's moments and master weights between Megatron's and HuggingFace's names.

optimizer.state.exp_avg.decoder.layers....  <-->  exp_avg.model.layers....
"""

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint_tools.assembly import Assembly
from checkpoint_tools.hf import open_hf
from checkpoint_tools.hf_output import make_hf
from checkpoint_tools.megatron_model import Wanted, hf_assemblies, megatron_assemblies
from checkpoint_tools.options import Effort
from checkpoint_tools.produce import ConversionReport
from checkpoint_tools.stored import Checkpoint, Chunk, StoredTensor
from checkpoint_tools.torch_dist import COMMON, OPTIMIZER, copy_common, parse_common
from mcore_rl.weights.hf.folder import write_index
from mcore_rl.weights.models.table import HfConfig, Shape

PREFIX = OPTIMIZER + "state."
STATES = ("param", "exp_avg", "exp_avg_sq")


def optimizer_to_hf(
    source: Checkpoint, config: HfConfig, out: Path, max_file_bytes: int, effort: Effort
) -> ConversionReport:
    """Write the optimizer's state to `out`; steps and learning rates go to common.pt.

    Raises ValueError if the checkpoint has no Adam state, or with the tensor that is wrong.
    """
    by_state: dict[str, list[StoredTensor]] = defaultdict(list)
    for key, tensor in source.tensors.items():
        if key.startswith(PREFIX):
            state, _, model_key = key.removeprefix(PREFIX).partition(".")
            by_state[state].append(replace(tensor, key=model_key))
    if sorted(by_state) != sorted(STATES):
        raise ValueError(
            f"{source.folder} has optimizer state {sorted(by_state)}, only that of Adam, "
            f"{sorted(STATES)}, can be carried"
        )
    common, _ = copy_common(source.folder)
    assemblies: dict[str, Assembly] = {}
    for state, tensors in sorted(by_state.items()):
        where = f"{source.folder}: optimizer state {state!r}"
        made = hf_assemblies(tensors, config, None, where, with_buffers=False)
        for name, assembly in made.items():
            assemblies[f"{state}.{name}"] = replace(assembly, name=f"{state}.{name}")

    def describe(folder: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
        (folder / COMMON).write_bytes(common.getvalue())
        write_index(folder, weight_map, total_bytes)

    return make_hf(out, [source], assemblies, frozenset(), describe, max_file_bytes, effort)


def optimizer_from_hf(
    folder: Path, wanted: Sequence[Wanted], config: HfConfig
) -> tuple[Checkpoint, list[tuple[Wanted, Shape, Assembly]], dict[str, Any]]:
    """Read what `optimizer_to_hf` wrote.

    Returns the checkpoint, (tensor, offset, assembly) for each box of Megatron's state, and the
    content of common.pt. Raises ValueError with the file or tensor that is wrong.
    """
    source = open_hf(folder)
    path = folder / COMMON
    common = parse_common(io.BytesIO(path.read_bytes()), path)
    if "optimizer" not in common:
        raise ValueError(f"{path} has no state of an optimizer")
    trained = [replace(tensor, dtype="float32") for tensor in wanted if not tensor.is_buffer]
    boxes: list[tuple[Wanted, Shape, Assembly]] = []
    for state in STATES:
        chunks: dict[str, Chunk] = {
            name.removeprefix(f"{state}."): tensor.chunks[0]
            for name, tensor in source.tensors.items()
            if name.startswith(f"{state}.")
        }
        for tensor, offset, made in megatron_assemblies(trained, chunks, config, folder):
            key = f"{PREFIX}{state}.{tensor.key}"
            boxes.append((replace(tensor, key=key), offset, replace(made, name=key)))
    return source, boxes, common
