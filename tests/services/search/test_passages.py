"""A corpus is read row by row; broken rows are refused by file and line."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.services.search.layout import MappedFile, parse_row, read_lines, split_title
from tests.services.search.corpora import write_corpus


def test_rows_lie_where_the_lines_say(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["a\nb", "ä\nü", "c"])
    lines = list(read_lines(corpus))
    assert [line.row["contents"] for line in lines] == ["a\nb", "ä\nü", "c"]
    assert lines[-1].stop == corpus.stat().st_size
    with closing(MappedFile(corpus)) as mapped:
        assert [mapped.row(line.start, line.stop) for line in lines] == [x.row for x in lines]
    rest = list(read_lines(corpus, lines[1].start, 2))
    assert rest == lines[1:]


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"{", "is not JSON"),
        (b"\n", "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b'{"id": 1}', "has no text as `contents`"),
        (b'{"id": 1, "contents": "  "}', "has no text as `contents`"),
        (b'{"contents": "a"}', "has neither text nor a number as `id`"),
        (b'{"id": [], "contents": "a"}', "has neither text nor a number as `id`"),
        (b'\xff{"id": 1}', "is not JSON"),
    ],
)
def test_a_broken_row_is_named_with_its_line(tmp_path: Path, raw: bytes, problem: str) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["a", "b"])
    corpus.write_bytes(corpus.read_bytes() + raw)
    with pytest.raises(ValueError, match=rf"corpus.jsonl:3: the line {problem}"):
        list(read_lines(corpus))


@given(st.text(), st.text(alphabet=st.characters(exclude_characters="\n")))
def test_title_and_text(text: str, title: str) -> None:
    row = parse_row(json.dumps({"id": 1, "contents": f'x"{title}"\n{text}'}).encode(), "here")
    found, rest = split_title(row)
    assert rest == text and found.startswith("x")
    assert split_title({"contents": f'"{title}"\n{text}'})[0] == title.strip('"')
