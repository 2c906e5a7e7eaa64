"""Lists the contents of a checkpoint: as a table for people or as one JSON object."""

from collections import Counter
from typing import Any

from checkpoint_tools.options import show_bytes
from checkpoint_tools.stored import Checkpoint
from checkpoint_tools.torch_dist import read_common


def list_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return step and layout of a Megatron checkpoint, or the architecture of a HuggingFace
    directory.

    Step and layout are missing if common.pt needs classes that are not loaded here.
    """
    if checkpoint.kind == "hf":
        return dict(checkpoint.facts)
    common = read_common(checkpoint.folder)
    return {name: common[name] for name in ("step", "layout", "iteration") if name in common}


def encode_listing(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return kind, facts, totals and every tensor by name, as JSON-like values."""
    return {
        "folder": str(checkpoint.folder),
        "kind": checkpoint.kind,
        "checksums": checkpoint.sums is not None,
        **list_facts(checkpoint),
        "num_tensors": len(checkpoint.tensors),
        "bytes": checkpoint.num_bytes,
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": tensor.num_bytes,
                "chunks": len(tensor.chunks),
                "files": sorted({chunk.file for chunk in tensor.chunks}),
            }
            for name, tensor in sorted(checkpoint.tensors.items())
        },
        "objects": sorted(item.key for item in checkpoint.items),
    }


def print_listing(checkpoint: Checkpoint) -> None:
    """Print a table of the tensors, then facts and totals."""
    rows = [("tensor", "dtype", "shape", "chunks", "bytes")]
    for name, tensor in sorted(checkpoint.tensors.items()):
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        num_chunks = str(len(tensor.chunks))
        rows.append((name, tensor.dtype, shape, num_chunks, show_bytes(tensor.num_bytes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    files = {chunk.file for tensor in checkpoint.tensors.values() for chunk in tensor.chunks}
    dtypes = Counter(tensor.dtype for tensor in checkpoint.tensors.values())
    print()
    for name, value in list_facts(checkpoint).items():
        print(f"{name}: {value}")
    print(f"kind: {checkpoint.kind}")
    counts = ", ".join(f"{count} of {dtype}" for dtype, count in dtypes.items())
    print(f"tensors: {len(checkpoint.tensors)} ({counts}), {len(checkpoint.items)} other objects")
    print(
        f"bytes: {checkpoint.num_bytes} ({show_bytes(checkpoint.num_bytes)}) in {len(files)} files"
    )
    print(f"checksums: {'checksums.json' if checkpoint.sums is not None else 'none'}")
