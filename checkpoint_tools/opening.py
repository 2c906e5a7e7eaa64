"""Opens the checkpoint in a folder, of either kind."""

from pathlib import Path

from checkpoint_tools.hf import open_hf
from checkpoint_tools.stored import Checkpoint
from checkpoint_tools.torch_dist import is_torch_dist, open_torch_dist, refuse_other_megatron
from mcore_rl.weights.hf.config import describe_download


def open_checkpoint(folder: Path, use_sums: bool = True) -> Checkpoint:
    """Open a Megatron checkpoint or a HuggingFace directory and check its structure.

    `use_sums` reads checksums.json, if there is one. Raises ValueError with the file or tensor
    that is wrong.
    """
    if not folder.exists():
        raise ValueError(f"{folder} does not exist{describe_download(folder)}")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if is_torch_dist(folder):
        return open_torch_dist(folder, use_sums)
    refuse_other_megatron(folder)
    return open_hf(folder, use_sums)
