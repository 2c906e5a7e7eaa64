"""A shard ranks as the formula says and as bm25s would; its words, and merged rankings."""

import math
from pathlib import Path

import bm25s
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.services.search.index import RANK_OFFSET, fuse
from mcore_rl.services.search.methods import (
    K1,
    STOP_WORDS,
    B,
    Bm25Shard,
    best_of,
    build_bm25,
    hash_words,
    words_of,
)
from tests.services.search.corpora import random_texts


def score(texts: list[str], query: str, place: int) -> float:
    """BM25 as in Lucene, term by term."""
    documents = [words_of(text) for text in texts]
    mean_len = sum(map(len, documents)) / len(documents)
    total = 0.0
    for word in words_of(query):
        frequency = sum(word in document for document in documents)
        count = documents[place].count(word)
        idf = math.log(1 + (len(texts) - frequency + 0.5) / (frequency + 0.5))
        damping = K1 * (1 - B + B * len(documents[place]) / mean_len)
        total += idf * count / (count + damping)
    return total


@pytest.mark.parametrize("query", ["w3 w7", "w1 w1 w2", "title17 w40 unknown", "the w5"])
def test_scores_are_those_of_the_formula(tmp_path: Path, query: str) -> None:
    texts = random_texts(60)
    build_bm25(texts, tmp_path / "shard")
    found = Bm25Shard(tmp_path / "shard").top(query, 60)
    expected = {i: score(texts, query, i) for i in range(len(texts))}
    assert found == sorted(found, key=lambda item: -item[1])
    assert {i for i, _ in found} == {i for i, value in expected.items() if value > 0}
    assert [value for _, value in found] == pytest.approx([expected[i] for i, _ in found], rel=1e-4)


def test_bm25s_reads_the_files_and_agrees_with_its_own(tmp_path: Path) -> None:
    texts = random_texts(80, seed=1)
    build_bm25(texts, tmp_path / "shard")
    ours = bm25s.BM25.load(tmp_path / "shard")
    theirs = bm25s.BM25(k1=K1, b=B, method="lucene")
    theirs.index([words_of(text) for text in texts], show_progress=False)
    for query in (["w3", "w9"], ["w0"], ["title5", "w2"]):
        np.testing.assert_allclose(ours.get_scores(query), theirs.get_scores(query), rtol=1e-5)


def test_nothing_matches_nothing(tmp_path: Path) -> None:
    build_bm25(["the", "of"], tmp_path / "shard")
    assert Bm25Shard(tmp_path / "shard").top("the mayor", 3) == []
    build_bm25(["mayor"], tmp_path / "other")
    assert Bm25Shard(tmp_path / "other").top("", 3) == []


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.5]), max_size=30), st.integers(1, 40))
def test_the_best_come_first_and_of_equal_ones_the_first(values: list[float], num: int) -> None:
    expected = sorted(((i, v) for i, v in enumerate(values) if v > 0), key=lambda x: (-x[1], x[0]))
    assert best_of(np.array(values, np.float32), num) == expected[:num]


def test_words_of_a_sentence() -> None:
    assert words_of("Who is the Mayor of Zürich, in 1998?") == ["who", "mayor", "zürich", "1998"]
    assert words_of("The of") == []


@given(st.text())
def test_words_do_not_depend_on_the_case_of_ascii(text: str) -> None:
    words = words_of(text)
    assert not STOP_WORDS & set(words)
    assert words_of(" ".join(words)) == words


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), unique=True))
def test_different_words_have_different_hashes(words: list[str]) -> None:
    hashes = hash_words(words)
    assert hashes.dtype == np.uint64 and len(set(hashes.tolist())) == len(words)


def test_hashes_stay_as_they_are_on_disk() -> None:
    assert hash_words(["mayor"]).tolist() == [8961826493462299950]
    assert len(hash_words([])) == 0


RANKING = st.lists(st.integers(0, 20), unique=True)


def test_what_both_find_comes_first() -> None:
    assert [passage for passage, _ in fuse([[1, 2, 3], [4, 2]], 3)] == [2, 1, 4]
    assert fuse([[5]], 1) == [(5, 1 / (RANK_OFFSET + 1))]


@given(st.lists(RANKING, max_size=4), st.integers(1, 30))
def test_a_fusion_keeps_every_passage_once(rankings: list[list[int]], num: int) -> None:
    found = fuse(rankings, num)
    everything = {passage for ranking in rankings for passage in ranking}
    assert len(found) == min(num, len(everything)) == len({passage for passage, _ in found})
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True)
    assert fuse(rankings[::-1], num) == fuse(rankings, num) or len(rankings) > 2


@given(RANKING)
def test_a_ranking_with_itself_stays(ranking: list[int]) -> None:
    assert [passage for passage, _ in fuse([ranking, ranking], 30)] == ranking
