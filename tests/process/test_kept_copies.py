"""Parts of flat states are found in the copies of ranks that divided them otherwise."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.process.kept_copies import Header, Span, decode_index, encode_index, plan_reads

SIZES = {"weights": 23, "moments": 23, "bias": 7}


def divide(cuts: dict[str, list[int]], num_ranks: int, place: int) -> dict[str, list[Span]]:
    """Give each rank what lies between two cuts of each state, one after another in its copy."""
    ranks: dict[str, list[Span]] = {}
    for rank in range(num_ranks):
        at, spans = place, []
        for key, edges in cuts.items():
            start, stop = [*pairwise(edges)][rank]
            if start < stop:
                spans.append(Span(key, start, stop, at))
                at += stop - start + 3
        ranks[f"rank{rank}"] = spans
    return ranks


def draw_cuts(data: st.DataObject, num_ranks: int) -> dict[str, list[int]]:
    return {
        key: [0, *sorted(data.draw(st.integers(0, size)) for _ in range(num_ranks - 1)), size]
        for key, size in SIZES.items()
    }


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_byte_comes_once_and_from_where_it_lies(
    num_before: int, num_after: int, data: st.DataObject
) -> None:
    held = divide(draw_cuts(data, num_before), num_before, place=5)
    copies = {rank: [("", -1)] * 120 for rank in held}
    for rank, spans in held.items():
        for span in spans:
            for i in range(span.stop - span.start):
                copies[rank][span.place + i] = (span.key, span.start + i)
    for spans in divide(draw_cuts(data, num_after), num_after, place=40).values():
        composed: dict[int, tuple[str, int]] = {}
        for read in plan_reads(spans, held):
            for i in range(read.num_bytes):
                assert read.place + i not in composed
                composed[read.place + i] = copies[read.source][read.start + i]
        wanted = {
            span.place + i: (span.key, span.start + i)
            for span in spans
            for i in range(span.stop - span.start)
        }
        assert composed == wanted


def test_what_several_ranks_hold_comes_from_the_nearest() -> None:
    held = {"near": [Span("bias", 0, 7, 10)], "far": [Span("bias", 0, 7, 30)]}
    [read] = plan_reads([Span("bias", 0, 7, 1)], held)
    assert (read.source, read.start) == ("near", 10)


def test_what_nobody_holds_is_named() -> None:
    held = {"rank0": [Span("weights", 0, 10, 5)]}
    with pytest.raises(ValueError, match=r"no rank's copy has byte 10 of weights"):
        plan_reads([Span("weights", 4, 12, 0)], held)


def test_header_and_index_come_back_as_they_were() -> None:
    header = Header(3, 17, 4096, "ab", 2**64 - 1, 4000)
    assert Header.parse(header.encode() + bytes(100)) == header
    assert Header.parse(bytes(100)) is None
    spans = [Span("pp0 tp1/0.decoder/param", 5, 2**40, 64)]
    assert decode_index(encode_index(spans)) == spans
