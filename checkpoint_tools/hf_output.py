"""Assemblies in, the safetensors files and small files of a HuggingFace directory out."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from checkpoint_tools.hf import open_hf
from checkpoint_tools.options import Effort
from checkpoint_tools.output import Made, OutputFile, Task
from checkpoint_tools.produce import Report, produce
from checkpoint_tools.safetensors_file import make_header
from checkpoint_tools.stored import Checkpoint
from mcore_rl.slices.families.table import Shape
from mcore_rl.slices.hf.folder import deal_out
from mcore_rl.slices.hf.fp8 import FP8, SCALE_DTYPE, num_blocks, scale_name

Describe = Callable[..., None]
"""(folder, weight_map=tensor -> file, total_bytes=...): writes the small files of a folder."""


def make_hf(
    out: Path,
    sources: Sequence[Checkpoint],
    assemblies: Mapping[str, Made],
    quantized: frozenset[str],
    describe: Describe,
    max_file_bytes: int,
    effort: Effort,
) -> Report:
    """Write a directory of safetensors files.

    quantized   names of the matrices to write as 8-bit values and scales
    describe    writes the small files, the index among them
    Errors: see `produce`.
    """
    sizes = {name: assembly.num_bytes for name, assembly in assemblies.items()}
    num_files = max(1, min(len(sizes), -(-sum(sizes.values()) // max_file_bytes)))
    bins = deal_out(sizes, num_files)
    files, weight_map, expected = [], {}, {}
    for number, names in enumerate(bins, start=1):
        filename = f"model-{number:05d}-of-{num_files:05d}.safetensors"
        tensors = _tensors({name: assemblies[name] for name in sorted(names)}, quantized)
        files.append(
            _file(filename, tensors, {name: assemblies[name] for name in names}, quantized)
        )
        weight_map |= dict.fromkeys(tensors, filename)
        expected |= tensors
    total = sum(file.num_bytes - len(file.header) for file in files)
    complete = partial(describe, weight_map=weight_map, total_bytes=total)
    return produce(out, sources, files, effort, complete, open_hf, expected)


def _tensors(
    assemblies: Mapping[str, Made], quantized: frozenset[str]
) -> dict[str, tuple[str, Shape]]:
    tensors: dict[str, tuple[str, Shape]] = {}
    for name, assembly in assemblies.items():
        if name in quantized:
            tensors[name] = FP8, assembly.shape
            tensors[scale_name(name)] = SCALE_DTYPE, tuple(map(num_blocks, assembly.shape))
        else:
            tensors[name] = assembly.dtype, assembly.shape
    return tensors


def _file(
    filename: str,
    tensors: Mapping[str, tuple[str, Shape]],
    assemblies: Mapping[str, Made],
    quantized: frozenset[str],
) -> OutputFile:
    header, starts, num_bytes = make_header(tensors)
    tasks = [
        Task(
            filename,
            starts[name],
            assembly,
            False,
            starts[scale_name(name)] if name in quantized else None,
        )
        for name, assembly in assemblies.items()
    ]
    tasks.sort(key=lambda task: task.start)
    return OutputFile(filename, num_bytes, header, tuple(tasks))
