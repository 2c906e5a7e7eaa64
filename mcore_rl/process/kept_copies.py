"""Says what a copy of a rank's state in kept memory holds, and at which byte.

    | header: step, lengths, digest | small values | tensor bytes ... | index |
                                                     ^                  each part of a flat state:
                                                     place              key, [start, stop), place

Ranks of another data-parallel layout hold other parts of the same flat states. What one of them
needs is found by the indexes of the earlier ranks' copies:

    dp 3   [ a ....... )[ b ....... )[ c ....... )      a, b, c: copies of the earlier ranks
    dp 2   [ x ............ )[ y ............ )         x = a + beginning of b
"""

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass

from mcore_rl.process.kept_memory import HEADER_BYTES


@dataclass(frozen=True)
class Header:
    """The contents of a copy: its bytes, and digests of the tensors' sizes and of all bytes.

    index   where the index begins, which ends with the copy
    """

    step: int
    num_small: int
    num_bytes: int
    lengths: str
    digest: int
    index: int

    @staticmethod
    def parse(content: bytes) -> "Header | None":
        """Return the header in the first HEADER_BYTES of a piece; None if it has no copy."""
        text = content.rstrip(b"\0")
        return Header(**json.loads(text)) if text else None

    def encode(self) -> bytes:
        content = json.dumps(asdict(self)).encode()
        assert len(content) < HEADER_BYTES, content
        return content


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of the flat state `key`, at byte `place` of a copy."""

    key: str
    start: int
    stop: int
    place: int


@dataclass(frozen=True)
class Read:
    """Bytes to copy from byte `start` of the copy of rank `source` to byte `place` of another."""

    source: str
    start: int
    place: int
    num_bytes: int


def encode_index(spans: Iterable[Span]) -> bytes:
    return zlib.compress(json.dumps([astuple(span) for span in spans]).encode())


def decode_index(content: bytes) -> list[Span]:
    return [Span(*fields) for fields in json.loads(zlib.decompress(content))]


def plan_reads(wanted: Iterable[Span], held: Mapping[str, Sequence[Span]]) -> list[Read]:
    """Return what fills the spans `wanted`, each byte once.

    held   spans by rank; what several ranks hold is read from the first of them
    Raises ValueError with the state and the bytes that no rank holds.
    """
    holders: dict[str, list[tuple[str, Span]]] = defaultdict(list)
    for rank, spans in held.items():
        for span in spans:
            holders[span.key].append((rank, span))
    return [read for span in wanted for read in _fill(span, holders[span.key])]


def _fill(wanted: Span, holders: Sequence[tuple[str, Span]]) -> list[Read]:
    reads = []
    at = wanted.start
    while at < wanted.stop:
        found = next(((rank, span) for rank, span in holders if span.start <= at < span.stop), None)
        if found is None:
            raise ValueError(f"no rank's copy has byte {at} of {wanted.key}")
        rank, span = found
        stop = min(span.stop, wanted.stop)
        source, place = span.place + at - span.start, wanted.place + at - wanted.start
        reads.append(Read(rank, source, place, stop - at))
        at = stop
    return reads
