"""Writes assemblies of tensors to the files of a HuggingFace directory."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from checkpoint_tools.hf import open_hf
from checkpoint_tools.options import Effort
from checkpoint_tools.output import Made, OutputFile, Task, compute_share
from checkpoint_tools.produce import ConversionReport, produce
from checkpoint_tools.safetensors_file import make_header
from checkpoint_tools.stored import Checkpoint, Chunk
from mcore_rl.weights.hf.folder import deal_out
from mcore_rl.weights.hf.fp8 import FP8, SCALE_DTYPE, count_blocks, make_scale_name
from mcore_rl.weights.hf.int4 import GROUP, PACKED_DTYPE, PER_WORD, list_part_names
from mcore_rl.weights.models.table import Shape

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
    reopen: Callable[[Path], Checkpoint] = open_hf,
    int4: Mapping[str, Chunk] | None = None,
) -> ConversionReport:
    """Write a directory of safetensors files.

    quantized   names of the matrices to write as 8-bit values and scales
    describe    writes the small files, including the index
    reopen      opens the directory with every check
    int4        matrices to write as INT4 words and scales -> the chunks that hold them in INT4 now
    Raises what `produce` raises.
    """
    sizes = {name: assembly.num_bytes for name, assembly in assemblies.items()}
    share = compute_share(sum(sizes.values()), max_file_bytes)
    num_files = max(1, min(len(sizes), -(-sum(sizes.values()) // share)))
    files: list[OutputFile] = []
    weight_map: dict[str, str] = {}
    expected: dict[str, tuple[str, Shape]] = {}
    for number, names in enumerate(deal_out(sizes, num_files), start=1):
        filename = f"model-{number:05d}-of-{num_files:05d}.safetensors"
        in_file = {name: assemblies[name] for name in names}
        tensors = _list_stored(in_file, quantized, int4 or {})
        files.append(_make_file(filename, tensors, in_file, quantized, int4 or {}))
        weight_map |= dict.fromkeys(tensors, filename)
        expected |= tensors
    total = sum(file.num_bytes - len(file.header) for file in files)
    complete = partial(describe, weight_map=weight_map, total_bytes=total)
    return produce(out, sources, files, effort, complete, reopen, expected)


def _list_stored(
    assemblies: Mapping[str, Made], quantized: frozenset[str], int4: Mapping[str, Chunk]
) -> dict[str, tuple[str, Shape]]:
    """Return (dtype, shape) of each tensor of a file, scales included."""
    tensors: dict[str, tuple[str, Shape]] = {}
    for name, assembly in sorted(assemblies.items()):
        if name in quantized:
            tensors[name] = FP8, assembly.shape
            tensors[make_scale_name(name)] = SCALE_DTYPE, tuple(map(count_blocks, assembly.shape))
        elif name in int4:
            words, scales, _ = list_part_names(name)
            rows, columns = assembly.shape
            tensors[words] = PACKED_DTYPE, (rows, columns // PER_WORD)
            tensors[scales] = int4[name].dtype, (rows, columns // GROUP)
        else:
            tensors[name] = assembly.dtype, assembly.shape
    return tensors


def _make_file(
    filename: str,
    tensors: Mapping[str, tuple[str, Shape]],
    assemblies: Mapping[str, Made],
    quantized: frozenset[str],
    int4: Mapping[str, Chunk],
) -> OutputFile:
    header, starts, num_bytes = make_header(tensors)
    tasks: list[Task] = []
    for name, assembly in assemblies.items():
        if name in int4:
            words, scales, _ = list_part_names(name)
            places = starts[words], assembly, False, starts[scales], int4[name]
            tasks.append(Task(filename, *places))
            continue
        scales_start = starts[make_scale_name(name)] if name in quantized else None
        tasks.append(Task(filename, starts[name], assembly, scales_start=scales_start))
    tasks.sort(key=lambda task: task.start)
    return OutputFile(filename, num_bytes, header, tuple(tasks))
