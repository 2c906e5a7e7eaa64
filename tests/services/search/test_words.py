"""Words are in lower case, without the most frequent ones, and have stable hashes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.services.search.bm25 import STOP_WORDS, hash_words, words_of


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
