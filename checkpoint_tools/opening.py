"""A folder in, the checkpoint that it holds out, whatever its kind."""

from pathlib import Path

from checkpoint_tools.hf import open_hf
from checkpoint_tools.stored import Checkpoint
from checkpoint_tools.torch_dist import is_torch_dist, open_torch_dist


def open_checkpoint(folder: Path, use_sums: bool = True) -> Checkpoint:
    """`use_sums`: with checksums.json, if it came with one.

    ValueError names the file or tensor that is wrong.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} does not exist" if not folder.exists() else f"{folder} is no folder"
        )
    return (open_torch_dist if is_torch_dist(folder) else open_hf)(folder, use_sums)
