"""Codes how a message differs from the one before, in elements of two bytes.

    before   a b c d e f g h        changed elements     C and G
    now      a b C d e f G h

    gaps     2 3 | C G              elements that stay before each changed one, a byte each
    bits     00100010 | C G         a bit per element

Whichever is shorter is taken. A gap of more than 255 is cut by elements that are sent although they
stay. After a step of reinforcement learning in bfloat16 most elements stay: an update is much
smaller than the distance between neighboring numbers.

Compiled code (device/native/changes.c) does it where there is a compiler, numpy elsewhere; both
ends need not have the same.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from mcore_rl.device.native import load
from mcore_rl.types import Array

Form = Literal["gaps", "bits"]
ELEMENT_BYTES = 2
_LONGEST_GAP = 255
_WORD_BITS = 64


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


@cache
def find_library() -> Any:
    """Return the compiled code, or None if there is no compiler."""
    library = load("changes")
    if library is not None:
        library.mark_changes.restype = library.gaps_of.restype = ctypes.c_int64
        library.values_of.restype = None
    return library


def elements(message_u8: Any) -> Array:
    """Return a uint16 view of a message, a CPU tensor of an even number of bytes."""
    return message_u8.numpy().view(np.uint16)


def take_changes(before: Array, now: Array) -> Changes:
    """Return how uint16 `now` differs from `before`, which becomes equal to it."""
    library = find_library()
    if library is not None:
        return _take_changes_compiled(library, before, now)
    changed = before != now
    np.copyto(before, now)
    index = np.flatnonzero(changed)
    num_extra = _num_extra(index)
    if _are_gaps_shorter(len(index) + num_extra, num_extra, len(now)):
        with_extra = _with_extra(index)
        gaps = np.diff(with_extra, prepend=-1) - 1
        return Changes("gaps", gaps.astype(np.uint8), now[with_extra])
    return Changes("bits", np.packbits(changed, bitorder="little"), now[index])


def apply(form: Form, places: Array, values_u8: Array, to: Array) -> None:
    """Change the elements of `to`, which is as the message before, in place.

    values_u8   bytes of the changed elements, at any address

    Raises ValueError if the places lie beyond the message or are not as many as the values; then
    some elements may have changed.
    """
    num_values = len(values_u8) // ELEMENT_BYTES
    num_places = num_places_bytes(form, num_values, len(to))
    if len(places) != num_places or len(values_u8) % ELEMENT_BYTES:
        raise ValueError(f"{len(places)} bytes of places for {len(values_u8)} bytes of values")
    library = find_library()
    if library is not None:
        call = library.apply_gaps if form == "gaps" else library.apply_bits
        wrong = call(
            _address(places), _address(values_u8), _int64(num_values), _address(to), _int64(len(to))
        )
        index_fits = not wrong
    else:
        if form == "gaps":
            index = np.cumsum(places, dtype=np.int64) + np.arange(len(places))
        else:
            index = np.flatnonzero(np.unpackbits(places, count=len(to), bitorder="little"))
        index_fits = len(index) == num_values and not (num_values and index[-1] >= len(to))
        if index_fits:
            to[index] = np.frombuffer(values_u8.tobytes(), np.uint16)
    if not index_fits:
        raise ValueError(f"places of {num_values} values do not fit {len(to)} elements")


def num_places_bytes(form: Form, num_values: int, num_elements: int) -> int:
    """Return the size of `places`."""
    return num_values if form == "gaps" else -(-num_elements // 8)


def _take_changes_compiled(library: Any, before: Array, now: Array) -> Changes:
    bits = np.empty(-(-len(now) // _WORD_BITS), np.uint64)
    length = _int64(len(now))
    changed: int = library.mark_changes(_address(before), _address(now), length, _address(bits))
    if _are_gaps_shorter(changed, 0, len(now)):
        most = changed + len(now) // (_LONGEST_GAP + 1)
        gaps, values = np.empty(most, np.uint8), np.empty(most, np.uint16)
        places = _address(bits), length, _address(now)
        sent: int = library.gaps_of(*places, _address(gaps), _address(values))
        if _are_gaps_shorter(sent, sent - changed, len(now)):
            return Changes("gaps", gaps[:sent], values[:sent])
    values = np.empty(changed, np.uint16)
    library.values_of(_address(bits), length, _address(now), _address(values))
    num_places = num_places_bytes("bits", changed, len(now))
    return Changes("bits", bits.view(np.uint8)[:num_places], values)


def _are_gaps_shorter(num_gaps: int, num_extra: int, num_elements: int) -> bool:
    """Return whether gaps take fewer bytes than bits; `num_extra` of them lead to what stays."""
    return num_gaps + ELEMENT_BYTES * num_extra < -(-num_elements // 8)


def _address(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _int64(number: int) -> ctypes.c_int64:
    return ctypes.c_int64(number)


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
