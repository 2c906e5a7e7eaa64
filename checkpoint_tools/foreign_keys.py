"""Reads the keys of a Megatron checkpoint that mcore_rl would not have written.

saved with singleton_local_shards                  the same rows without it
...experts.experts.5.linear_fc1.weight_w   --->    ...experts.experts.linear_fc1.weight, expert 5,
...experts.experts.5.linear_fc1.weight_v           w is the first half of the rows, v the second
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from checkpoint_tools.stored import Checkpoint, Chunk, StoredTensor
from mcore_rl.weights.layouts.training import LocalPart
from mcore_rl.weights.models.mtp import PREFIX

_HALF = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_([wv])")
_ADAM = re.compile(r"(chained_\d+\.)?optimizer\.state\.[a-z_]+\.")
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(.*)")


def find_part(tensor: StoredTensor, chunk: Chunk, num_experts: int, name: str) -> LocalPart:
    """Return a chunk as a part, called `name`, of the tensor that the family's table knows.

    megatron-core's `singleton_local_shards` gives each expert, and each half of a gated
    `linear_fc1`, a tensor of its own (`apply_swiglu_sharded_factory` in its transformer/mlp.py).
    """
    key, shape, start, local_shape = tensor.key, tensor.shape, chunk.offset, chunk.shape
    if half := _HALF.fullmatch(key):
        key = half[1]
        before = shape[0] if half[2] == "v" else 0
        start = (before + start[0], *start[1:])
        shape = (2 * shape[0], *shape[1:])
    if expert := _EXPERT.fullmatch(key):
        key = expert[1] + expert[3]
        start = (int(expert[2]), *start)
        shape = (num_experts, *shape)
        local_shape = (1, *local_shape)
    return LocalPart(key, shape, start, local_shape, name, chunk.dtype)


def drop_tensors(checkpoints: Sequence[Checkpoint], patterns: Sequence[str]) -> list[Checkpoint]:
    """Return the checkpoints without tensors, and Adam's state of tensors, that match a pattern.

    patterns   of the shell, such as "mtp.*", for the keys of tensors
    Raises ValueError with a pattern that matches no tensor of any checkpoint.
    """
    keys = [key for checkpoint in checkpoints for key in checkpoint.tensors]
    for pattern in patterns:
        if not any(_matches(key, [pattern]) for key in keys):
            where = " and ".join(str(checkpoint.folder) for checkpoint in checkpoints)
            raise ValueError(
                f"--leave-out {pattern!r} matches none of the {len(keys)} tensors of {where}; the"
                f" first is {min(keys)!r}"
            )
    return [
        replace(
            checkpoint,
            tensors={
                key: tensor
                for key, tensor in checkpoint.tensors.items()
                if not _matches(key, patterns)
            },
        )
        for checkpoint in checkpoints
    ]


def _matches(key: str, patterns: Sequence[str]) -> bool:
    of_model = _ADAM.sub("", key)
    return any(fnmatchcase(of_model, pattern) for pattern in patterns)


def explain_unknown(key: str) -> str:
    """Return what to do about a tensor that no family's table has."""
    if key.startswith(PREFIX):
        return (
            "no layer for multi-token prediction of this model is merged: none is in its table, or"
            " config.json says that it has none; --leave-out 'mtp.*' takes those of --source-hf,"
            " as far as it has them"
        )
    return "--leave-out PATTERN merges the checkpoint without the tensors whose keys match"
