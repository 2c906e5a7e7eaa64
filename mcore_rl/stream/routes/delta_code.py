"""Codes how a message differs from the one before, in elements of two bytes. Pure.

    before   a b c d e f g h        changed elements     C and G
    now      a b C d e f G h

    gaps     2 3 | C G              elements that stay before each changed one, a byte each
    bits     00100010 | C G         a bit per element

Whichever is shorter is taken. A gap of more than 255 is cut by elements that are sent although they
stay. After a step of reinforcement learning in bfloat16 most elements stay: an update is much
smaller than the distance between neighboring numbers.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mcore_rl.types import Array

Form = Literal["gaps", "bits"]
ELEMENT_BYTES = 2
_LONGEST_GAP = 255


@dataclass(frozen=True)
class Changes:
    """Changed elements of a message of `num_elements`.

    places   uint8, gaps or bits
    values   uint16, the changed elements
    """

    form: Form
    places: Array
    values: Array

    @property
    def num_bytes(self) -> int:
        return self.places.nbytes + self.values.nbytes


def elements(message_u8: Any) -> Array:
    """Return a uint16 view of a message, a CPU tensor of an even number of bytes."""
    return message_u8.numpy().view(np.uint16)


def difference(before: Array, now: Array) -> Changes:
    """Return how uint16 `now` differs from `before`."""
    changed = before != now
    index = np.flatnonzero(changed)
    num_extra = _num_extra(index)
    if len(index) + ELEMENT_BYTES * num_extra + num_extra < -(-len(now) // 8):
        with_extra = _with_extra(index)
        gaps = np.diff(with_extra, prepend=-1) - 1
        return Changes("gaps", gaps.astype(np.uint8), now[with_extra])
    return Changes("bits", np.packbits(changed), now[index])


def apply(form: Form, places: Array, values: Array, to: Array) -> None:
    """Change the elements of `to`, which is as the message before, in place.

    Raises ValueError if the places lie beyond it.
    """
    if form == "gaps":
        index = np.cumsum(places, dtype=np.int64) + np.arange(len(places))
    else:
        index = np.flatnonzero(np.unpackbits(places, count=len(to)))
    if len(index) != len(values) or (len(index) and index[-1] >= len(to)):
        raise ValueError(f"{len(values)} values for {len(index)} places in {len(to)} elements")
    to[index] = values


def num_places_bytes(form: Form, num_values: int, num_elements: int) -> int:
    """Return the size of `places`."""
    return num_values if form == "gaps" else -(-num_elements // 8)


def _num_extra(index: Array) -> int:
    """Return how many elements must be added so that no gap is too long."""
    gaps = np.diff(index, prepend=-1) - 1
    return int((gaps // (_LONGEST_GAP + 1)).sum())


def _with_extra(index: Array) -> Array:
    gaps = np.diff(index, prepend=-1) - 1
    nums = gaps // (_LONGEST_GAP + 1)
    if not nums.any():
        return index
    long = np.flatnonzero(nums)
    extra = [index[k] - (_LONGEST_GAP + 1) * np.arange(1, nums[k] + 1) for k in long.tolist()]
    return np.sort(np.concatenate([index, *extra]))
