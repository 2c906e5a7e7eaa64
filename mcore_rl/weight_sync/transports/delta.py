"""Sends between hosts only the difference of a message from the last message of its number.

    sender                                              receiver
    message now, kept: message before                   kept: message before
      first part: header, places and values   ----->    kept becomes the message now
      rest, if the first part was too short   ----->    its checksum is the header's?
                                              <-----    yes, or no: send it whole
      whole message                           ----->    only after a no

Both ends keep a copy of each message in host memory. For the first part they reserve a quarter more
than the last difference took, so that one part is usually enough. The first message of a number and
messages that changed for the most part are sent whole. Checksums of slices are compared as always.

A difference is coded in elements of two bytes:

    before   a b c d e f g h        changed elements     C and G
    now      a b C d e f G h

    gaps     2 3 | C G              unchanged elements before each changed one, a byte each
    bits     00100010 | C G         a bit per element

The shorter form is sent. A gap of more than 255 is cut by sending unchanged elements. After a step
of reinforcement learning in bfloat16 most elements are unchanged: an update is much smaller than
the distance between neighboring numbers.

Compiled code (device/native/changes.c) computes differences if there is a compiler, numpy
otherwise; the two ends need not agree.
"""

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from mcore_rl.device.native import load
from mcore_rl.types import Array
from mcore_rl.weight_sync.transports.gloo import GlooMessage, GlooTransport
from mcore_rl.weight_sync.transports.transport import Failure, WholeBuckets
from mcore_rl.weight_sync.waits import TransferError

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


def view_elements(message_u8: Any) -> Array:
    """Return a uint16 view of a message, a CPU tensor of an even number of bytes."""
    return message_u8.numpy().view(np.uint16)


def take_changes(before: Array, now: Array) -> Changes:
    """Return the changes from `before` to `now`, both uint16; `before` becomes equal to `now`."""
    library = find_library()
    if library is not None:
        return _take_changes_compiled(library, before, now)
    changed = before != now
    np.copyto(before, now)
    index = np.flatnonzero(changed)
    num_extra = _count_extra(index)
    if _are_gaps_shorter(len(index) + num_extra, num_extra, len(now)):
        with_extra = _insert_extra(index)
        gaps = np.diff(with_extra, prepend=-1) - 1
        return Changes("gaps", gaps.astype(np.uint8), now[with_extra])
    return Changes("bits", np.packbits(changed, bitorder="little"), now[index])


def apply(form: Form, places: Array, values_u8: Array, to: Array) -> None:
    """Apply changes to `to`, the last message, in place.

    values_u8   bytes of the changed elements, at any address

    Raises ValueError if places lie beyond the message, or are more or fewer than the values; then
    some elements may have changed.
    """
    num_values = len(values_u8) // ELEMENT_BYTES
    num_places = count_places_bytes(form, num_values, len(to))
    if len(places) != num_places or len(values_u8) % ELEMENT_BYTES:
        raise ValueError(f"{len(places)} bytes of places for {len(values_u8)} bytes of values")
    library = find_library()
    if library is not None:
        call = library.apply_gaps if form == "gaps" else library.apply_bits
        wrong = call(
            _make_pointer(places),
            _make_pointer(values_u8),
            _make_int64(num_values),
            _make_pointer(to),
            _make_int64(len(to)),
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


def count_places_bytes(form: Form, num_values: int, num_elements: int) -> int:
    """Return the size of `places`."""
    return num_values if form == "gaps" else -(-num_elements // 8)


def _take_changes_compiled(library: Any, before: Array, now: Array) -> Changes:
    bits = np.empty(-(-len(now) // _WORD_BITS), np.uint64)
    length = _make_int64(len(now))
    changed: int = library.mark_changes(
        _make_pointer(before), _make_pointer(now), length, _make_pointer(bits)
    )
    if _are_gaps_shorter(changed, 0, len(now)):
        most = changed + len(now) // (_LONGEST_GAP + 1)
        gaps, values = np.empty(most, np.uint8), np.empty(most, np.uint16)
        places = _make_pointer(bits), length, _make_pointer(now)
        sent: int = library.gaps_of(*places, _make_pointer(gaps), _make_pointer(values))
        if _are_gaps_shorter(sent, sent - changed, len(now)):
            return Changes("gaps", gaps[:sent], values[:sent])
    values = np.empty(changed, np.uint16)
    library.values_of(_make_pointer(bits), length, _make_pointer(now), _make_pointer(values))
    num_places = count_places_bytes("bits", changed, len(now))
    return Changes("bits", bits.view(np.uint8)[:num_places], values)


def _are_gaps_shorter(num_gaps: int, num_extra: int, num_elements: int) -> bool:
    """Return whether gaps take fewer bytes than bits; `num_extra` lead to unchanged elements."""
    return num_gaps + ELEMENT_BYTES * num_extra < -(-num_elements // 8)


def _make_pointer(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _make_int64(number: int) -> ctypes.c_int64:
    return ctypes.c_int64(number)


def _count_extra(index: Array) -> int:
    """Return how many unchanged elements must be sent so that no gap is too long."""
    gaps = np.diff(index, prepend=-1) - 1
    return int((gaps // (_LONGEST_GAP + 1)).sum())


def _insert_extra(index: Array) -> Array:
    gaps = np.diff(index, prepend=-1) - 1
    nums = gaps // (_LONGEST_GAP + 1)
    if not nums.any():
        return index
    long = np.flatnonzero(nums)
    extra = [index[k] - (_LONGEST_GAP + 1) * np.arange(1, nums[k] + 1) for k in long.tolist()]
    return np.sort(np.concatenate([index, *extra]))


_log = logging.getLogger(__name__)

_FIRST, _REST, _ANSWER, _AGAIN = range(4)
"""Tags: gloo keeps the order of messages of one tag."""
_HEADER_BYTES = 32
_WHOLE = 0
_FORMS: dict[int, Form] = {1: "gaps", 2: "bits"}
_CODES = {form: code for code, form in _FORMS.items()}
_LARGEST_SHARE = 0.75
"""A difference above this share of the message is not worth its coding."""
_FIRST_GUESS = 1 / 16
_RIGHT, _WRONG = 1, 0


@dataclass
class _Slot:
    """Keeps one end's state for the messages of one number with one peer.

    kept         the last message, which differences change in place; None before the first message
    reserved     bytes of the next difference that travel with the header
    """

    kept: Array | None = None
    reserved: int = 0

    def keep(self, message_u8: Tensor) -> None:
        """Keep a copy of the message."""
        now = view_elements(message_u8)
        if self.kept is None:
            self.kept = np.empty_like(now)
        np.copyto(self.kept, now)

    def reserve(self, message_bytes: int, code: int, coded_bytes: int, *, is_first: bool) -> None:
        """Set the reserved bytes from this message's difference, equally on both ends."""
        if is_first:
            self.reserved = int(message_bytes * _FIRST_GUESS)
        else:
            self.reserved = 0 if code == _WHOLE else coded_bytes * 5 // 4 + 64


@dataclass(frozen=True)
class _Sending:
    message_u8: Tensor
    peer: int
    what: str
    parts: list[GlooMessage]
    answer: GlooMessage | None

    def finish(self, transport: "DeltaTransport", deadline_s: float, failure: Failure) -> None:
        gloo = transport.gloo
        gloo.wait(self.parts, deadline_s, failure)
        if self.answer is None:
            return
        gloo.wait([self.answer], deadline_s, failure)
        if int(self.answer.tensor_u8[0]) == _RIGHT:
            return
        _log.warning("%s: its difference gave other bytes there; it is sent whole", self.what)
        again = gloo.start_send(self.message_u8, self.peer, f"{self.what} whole", _AGAIN)
        gloo.wait([again], deadline_s, failure)


@dataclass(frozen=True)
class _Receiving:
    message_u8: Tensor
    peer: int
    what: str
    slot: _Slot
    first: GlooMessage

    def finish(self, transport: "DeltaTransport", deadline_s: float, failure: Failure) -> None:
        gloo = transport.gloo
        gloo.wait([self.first], deadline_s, failure)
        first_u8 = self.first.tensor_u8
        code, num_values, checksum, coded_bytes = (
            first_u8[:_HEADER_BYTES].view(torch.int64).tolist()
        )
        if code == _WHOLE:
            rest = gloo.start_recv(self.message_u8, self.peer, self.what, _REST)
            gloo.wait([rest], deadline_s, failure)
            is_first = self.slot.kept is None
            self.slot.keep(self.message_u8)
            self.slot.reserve(len(self.message_u8), code, 0, is_first=is_first)
            return
        if code not in _FORMS or self.slot.kept is None or coded_bytes > len(self.message_u8):
            raise TransferError(f"{self.what}: no header of a difference: {code}, {coded_bytes}")
        coded = first_u8[_HEADER_BYTES : _HEADER_BYTES + coded_bytes]
        if len(coded) < coded_bytes:
            rest_u8 = torch.empty(coded_bytes - len(coded), dtype=torch.uint8)
            rest = gloo.start_recv(rest_u8, self.peer, f"the rest of {self.what}", _REST)
            gloo.wait([rest], deadline_s, failure)
            coded = torch.cat([coded, rest_u8])
        is_right = self._apply(_FORMS[code], coded.numpy(), num_values, checksum)
        answer_u8 = torch.full((8,), _RIGHT if is_right else _WRONG, dtype=torch.uint8)
        answer = gloo.start_send(answer_u8, self.peer, f"the answer to {self.what}", _ANSWER)
        gloo.wait([answer], deadline_s, failure)
        if is_right:
            sent = max(len(first_u8), _HEADER_BYTES + coded_bytes) + len(answer_u8)
            transport.num_saved += len(self.message_u8) - sent
        else:
            _log.warning("%s: its difference gives other bytes than were sent", self.what)
            again = gloo.start_recv(self.message_u8, self.peer, f"{self.what} whole", _AGAIN)
            gloo.wait([again], deadline_s, failure)
            self.slot.keep(self.message_u8)
        self.slot.reserve(len(self.message_u8), code, coded_bytes, is_first=False)

    def _apply(self, form: Form, coded: Array, num_values: int, checksum: int) -> bool:
        """Apply the difference to the kept message, and copy that; return whether it is right."""
        kept = self.slot.kept
        assert kept is not None
        num_places = count_places_bytes(form, num_values, len(kept))
        try:
            apply(form, coded[:num_places], coded[num_places:], kept)
        except ValueError:
            return False
        np.copyto(view_elements(self.message_u8), kept)
        return _take_checksum(self.message_u8) == checksum


class DeltaTransport(WholeBuckets):
    """Differences over gloo; messages must lie on the host."""

    def __init__(self, gloo: GlooTransport) -> None:
        self.gloo = gloo
        self.num_saved = 0
        """Bytes that did not travel, since `take_saved`."""
        self._slots: dict[tuple[int, int], _Slot] = {}
        self._started: list[_Sending | _Receiving] = []

    def device(self, peer: int) -> torch.device:
        return self.gloo.device(peer)

    def send(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        slot = self._slots.setdefault((peer, number), _Slot())
        parts, code = self._start_parts(slot, tensor_u8, peer, what)
        answer = None
        if code != _WHOLE:
            answer_u8 = torch.zeros(8, dtype=torch.uint8)
            answer = self.gloo.start_recv(answer_u8, peer, f"the answer to {what}", _ANSWER)
        self._started.append(_Sending(tensor_u8, peer, what, parts, answer))

    def recv(self, tensor_u8: Tensor, peer: int, what: str, number: int = 0) -> None:
        slot = self._slots.setdefault((peer, number), _Slot())
        first_u8 = torch.empty(_HEADER_BYTES + slot.reserved, dtype=torch.uint8)
        first = self.gloo.start_recv(first_u8, peer, what, _FIRST)
        self._started.append(_Receiving(tensor_u8, peer, what, slot, first))

    def run(self, deadline_s: float, failure: Failure, pending: int = 0) -> None:
        while len(self._started) > pending:
            self._started[0].finish(self, deadline_s, failure)
            del self._started[0]

    def take_saved(self) -> int:
        saved, self.num_saved = self.num_saved, 0
        return saved

    def close(self) -> None:
        self.gloo.close()
        self._started.clear()

    def _start_parts(
        self, slot: _Slot, message_u8: Tensor, peer: int, what: str
    ) -> tuple[list[GlooMessage], int]:
        """Start to send a message or its difference; return the parts and the code of the form."""
        now = view_elements(message_u8)
        first_u8 = torch.zeros(_HEADER_BYTES + slot.reserved, dtype=torch.uint8)
        changes = None if slot.kept is None else take_changes(slot.kept, now)
        if changes is None:
            slot.keep(message_u8)
        if changes is None or changes.num_bytes > _LARGEST_SHARE * len(message_u8):
            slot.reserve(len(message_u8), _WHOLE, 0, is_first=changes is None)
            first = self.gloo.start_send(first_u8, peer, what, _FIRST)
            return [first, self.gloo.start_send(message_u8, peer, what, _REST)], _WHOLE
        coded = np.concatenate([changes.places, changes.values.view(np.uint8)])
        code = _CODES[changes.form]
        header = [code, len(changes.values), _take_checksum(message_u8), len(coded)]
        first_u8[:_HEADER_BYTES].view(torch.int64).copy_(torch.tensor(header))
        num_first = min(len(coded), slot.reserved)
        first_u8[_HEADER_BYTES:].numpy()[:num_first] = coded[:num_first]
        parts = [self.gloo.start_send(first_u8, peer, what, _FIRST)]
        if num_first < len(coded):
            rest_u8 = torch.from_numpy(coded[num_first:].copy())
            parts.append(self.gloo.start_send(rest_u8, peer, f"the rest of {what}", _REST))
        slot.reserve(len(message_u8), code, len(coded), is_first=False)
        return parts, code


def _take_checksum(message_u8: Tensor) -> int:
    """Return XXH3 of the message as a signed integer for the header."""
    unsigned = xxh3_64_intdigest(message_u8.numpy().data)
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned
