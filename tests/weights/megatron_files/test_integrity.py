"""Checksums of a folder: each byte is checked by exactly one rank, and any change is found."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weights.hf.checksums import ByteSpan, FileSums, sum_file
from mcore_rl.weights.megatron_files.integrity import (
    COPY_AGAIN,
    add_remedy,
    check_sizes,
    find_damage,
    list_spans_of_rank,
)

SIZES = st.lists(st.integers(1, 1000), max_size=8)


def make_sums(sizes_by_file: list[list[int]]) -> dict[str, FileSums]:
    sums: dict[str, FileSums] = {}
    for number, sizes in enumerate(sizes_by_file):
        spans: list[ByteSpan] = []
        for size in sizes:
            spans.append(ByteSpan(spans[-1].stop if spans else 0, size, 0))
        sums[f"file{number}"] = FileSums(sum(sizes), tuple(spans))
    return sums


@given(files=st.lists(SIZES, max_size=4), num_ranks=st.integers(1, 9))
def test_every_span_goes_to_exactly_one_rank(files: list[list[int]], num_ranks: int) -> None:
    sums = make_sums(files)
    dealt = []
    for rank in range(num_ranks):
        shares = list_spans_of_rank(sums, rank, num_ranks)
        dealt += [(name, span) for name, spans in shares.items() for span in spans]
    assert dealt == [(name, span) for name in sorted(sums) for span in sums[name].spans]


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=200), num_ranks=st.integers(1, 9))
def test_shares_differ_by_less_than_two_spans(sizes: list[int], num_ranks: int) -> None:
    sums = make_sums([sizes])
    fair = sum(sizes) / num_ranks
    for rank in range(num_ranks):
        spans = list_spans_of_rank(sums, rank, num_ranks).get("file0", [])
        assert abs(sum(span.num_bytes for span in spans) - fair) <= max(sizes)


def test_the_damaged_span_is_found(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    spans = sum_file(path, [10, 50]).spans
    assert find_damage(tmp_path, "file", spans) is None
    for at, number in ((0, 0), (9, 0), (10, 1), (49, 1), (99, 2)):
        content = bytearray(range(100))
        content[at] ^= 4
        path.write_bytes(content)
        assert find_damage(tmp_path, "file", spans) == spans[number]
        others = [span for span in spans if span != spans[number]]
        assert find_damage(tmp_path, "file", others) is None


def test_missing_and_resized_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    sums = {"file": sum_file(path)}
    check_sizes(tmp_path, sums)
    path.write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"file has 4 bytes, by checksums\.json it should have 5"):
        check_sizes(tmp_path, sums)
    path.unlink()
    with pytest.raises(ValueError, match=r"file, named in checksums\.json, does not exist"):
        check_sizes(tmp_path, sums)


@pytest.mark.parametrize("name", ["more", "below/more"])
def test_a_file_that_is_not_listed_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    sums = {"file": sum_file(tmp_path / "file")}
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"{name} is not in checksums\.json: .*--changed <file>"):
        check_sizes(tmp_path, sums)


def test_hidden_files_need_no_entry_but_the_metadata_do(tmp_path: Path) -> None:
    (tmp_path / ".nfs0001").touch()
    check_sizes(tmp_path, {})
    (tmp_path / ".metadata").touch()
    with pytest.raises(ValueError, match=r"\.metadata is not in checksums\.json"):
        check_sizes(tmp_path, {})


@pytest.mark.parametrize(
    ("message", "has_remedy"),
    [
        ("/a/common.pt is damaged: Bad magic number for file header", True),
        ("/a/x.distcp has 5 bytes, 'w' should end at byte 9: it was truncated", True),
        ("/a/x.distcp: bytes 0 to 4, before 'w', belong to nothing", True),
        ("/a/x.distcp: 'w' at byte 4 overlaps another item", True),
        ("/a/checksums.json is damaged: copy it from the original again", False),
        ("/a is not a folder", False),
    ],
)
def test_damage_is_told_with_what_to_do(message: str, has_remedy: bool) -> None:
    told = add_remedy(message)
    assert told == (f"{message}: {COPY_AGAIN}" if has_remedy else message)
    assert add_remedy(told) == told
