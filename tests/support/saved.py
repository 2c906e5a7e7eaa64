"""Puts the tensors of a Megatron checkpoint together by torch alone."""

import re
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def saved_tensors(checkpoint: Path, pattern: str) -> dict[str, Tensor]:
    """Whole tensors by key; of keys whose beginning matches `pattern`."""
    described = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in described.items()
        if re.match(pattern, key) and isinstance(value, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=checkpoint, no_dist=True)  # type: ignore[arg-type]
    return tensors
