"""Tells models apart by a checksum that reads little of them, however large they are.

    model-*.safetensors --> name, dtype, shape and three samples of each tensor --> SHA-256

How tensors are divided among files does not matter. A model of 30 billion parameters has 19,000
tensors, of which 14 MB are read.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.folder import list_checkpoint_files
from mcore_rl.weights.models import hf_tensor_shapes
from mcore_rl.weights.models.table import HfConfig

SAMPLE_BYTES = 256
"""Bytes that are read at the beginning, in the middle and at the end of a tensor."""
MAX_THREADS = 8


def compute_base_sum(hf_dir: Path) -> str:
    """Return the checksum of the weights in a model directory, 64 hexadecimal digits.

    Raises ValueError as `list_checkpoint_files` does, and naming a file that is cut.
    """
    with ThreadPoolExecutor(MAX_THREADS) as threads:
        per_file = threads.map(_sum_tensors, list_checkpoint_files(hf_dir))
        return _combine(line for lines in per_file for line in lines)


def find_base_sum(init: str, model: ModelFacts, seed: int) -> str:
    """Return the checksum of the weights that a run begins with.

    init   model.init: the directory's weights ("hf"), or ones drawn from `seed` ("random")
    """
    if init == "random":
        return compute_random_sum(model.config, seed)
    return compute_base_sum(model.path)


def compute_random_sum(hf_config: HfConfig, seed: int) -> str:
    """Return the checksum of weights that are drawn at random (model.init=random)."""
    shapes = hf_tensor_shapes(hf_config)
    return _combine(f"random {seed} {name} {shape}" for name, shape in shapes.items())


def _combine(lines: Iterator[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _sum_tensors(path: Path) -> list[str]:
    """Return a line for each tensor of a safetensors file, with the checksum of its samples."""
    lines = []
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, stop = (8 + header_bytes + at for at in entry["data_offsets"])
            middle = (start + stop) // 2
            digest = hashlib.sha256()
            for at in (start, middle, max(start, stop - SAMPLE_BYTES)):
                wanted = min(SAMPLE_BYTES, stop - at)
                sample = os.pread(file.fileno(), wanted, at)
                if len(sample) < wanted:
                    raise ValueError(f"{path} ends within tensor {name!r}: download it again")
                digest.update(sample)
            lines.append(f"{name} {entry['dtype']} {entry['shape']} {digest.hexdigest()}")
    return lines
