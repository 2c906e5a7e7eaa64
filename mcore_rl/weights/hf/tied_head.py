"""Refuses a model whose config.json ties the output layer to the embeddings, but whose files don't.

transformers (5.19, PreTrainedModel.tie_weights) compares the two if both are stored: it ties them
if they are equal, otherwise it warns and uses the stored output layer, against config.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfConfig

BAND_ROWS = 4096
"""Rows that are compared at once."""


def refuse_untied_head(file_of: Mapping[str, Path], config: HfConfig) -> None:
    """Raise ValueError if a tied output layer is stored and differs from the embeddings.

    file_of   HF name -> file of all stored tensors
    Peak memory: BAND_ROWS rows of both.
    """
    family = family_of(config)
    for head in sorted(family.find_left_out(config) & file_of.keys()):
        embedding = family.tied[head]
        if embedding in file_of and not _are_equal(file_of, head, embedding):
            raise ValueError(
                f"{file_of[head]}: tensor {head!r} differs from {embedding!r}, although config.json"
                " says tie_word_embeddings=true. transformers uses both as they are stored: set"
                " tie_word_embeddings=false in config.json to do so, or remove the tensor"
            )


def _are_equal(file_of: Mapping[str, Path], first: str, second: str) -> bool:
    with (
        safe_open(file_of[first], framework="pt") as first_file,
        safe_open(file_of[second], framework="pt") as second_file,
    ):
        a, b = first_file.get_slice(first), second_file.get_slice(second)
        shape = a.get_shape()
        if shape != b.get_shape():
            return False
        bands = (slice(at, at + BAND_ROWS) for at in range(0, shape[0], BAND_ROWS))
        return all(_agree(a[band], b[band]) for band in bands)


def _agree(a: Any, b: Any) -> bool:
    """Return whether two tensors are equal in the narrower of their dtypes."""
    dtype = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    return bool((a.to(dtype) == b.to(dtype)).all())
