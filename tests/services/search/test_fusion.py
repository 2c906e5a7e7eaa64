"""Rankings are merged by the ranks alone."""

from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.services.search.index import RANK_OFFSET, fuse

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
