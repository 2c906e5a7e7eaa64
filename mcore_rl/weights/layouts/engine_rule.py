"""A rule that says how SGLang cuts a tensor over the ranks of an engine."""

from dataclasses import dataclass
from typing import Literal

ROWS, COLUMNS = 0, 1


@dataclass(frozen=True)
class EngineRule:
    """The group of ranks that cuts a tensor, and along which axis; "all" does not cut it.

    blocks     equal blocks of the axis, each of which is cut for itself: q, k and v in one tensor
    multiple   the axis is padded to a multiple of so many elements before it is cut
    is_first   only the first pipeline stage has a tensor of a tower, not every stage
    """

    group: Literal["all", "attention", "kv_heads", "tensor"]
    axis: int = ROWS
    blocks: int = 1
    multiple: int = 1
    is_first: bool = False


WHOLE = EngineRule("all")
"""The rule of a tensor that every rank holds whole."""
