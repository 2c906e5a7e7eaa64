"""Shuffled streams: every item once per epoch, repeatable, resumable."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.data.source import ShuffledStream


@given(
    st.integers(1, 30),
    st.integers(0, 3),
    st.lists(st.integers(1, 17), min_size=1, max_size=6),
    st.booleans(),
)
def test_resume_continues_the_order(
    num_items: int, seed: int, takes: list[int], shuffle: bool
) -> None:
    whole = ShuffledStream(range(num_items), seed, shuffle)
    expected = [whole.take(n) for n in takes]
    for cut in range(len(takes)):
        first = ShuffledStream(range(num_items), seed, shuffle)
        for n in takes[:cut]:
            first.take(n)
        second = ShuffledStream(range(num_items), seed, shuffle)
        second.load_state_dict(first.state_dict())
        assert [second.take(n) for n in takes[cut:]] == expected[cut:]


def test_every_epoch_has_every_item_once_in_another_order() -> None:
    stream = ShuffledStream(range(50), seed=1)
    first, second = stream.take(50), stream.take(50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != ShuffledStream(range(50), seed=2).take(50)


def test_state_of_other_data_is_refused() -> None:
    state = ShuffledStream(range(5), seed=0).state_dict()
    with pytest.raises(ValueError, match="num_items=5, this run 6"):
        ShuffledStream(range(6), seed=0).load_state_dict(state)
    with pytest.raises(ValueError, match="seed=0, this run 1"):
        ShuffledStream(range(5), seed=1).load_state_dict(state)


def test_items_that_were_begun_and_not_ended_are_begun_again_by_whoever_resumes() -> None:
    stream = ShuffledStream(range(8), seed=0)
    whole = ShuffledStream(range(8), seed=0).take(12)
    begun = [stream.begin() for _ in range(5)]
    assert [item for _, item in begun] == whole[:5]
    stream.end([0, 3])
    resumed = ShuffledStream(range(8), seed=0)
    resumed.load_state_dict(stream.state_dict())
    again = [resumed.begin() for _ in range(2)]
    assert again == [begun[1], begun[2]]
    resumed.end([1])
    twice = ShuffledStream(range(8), seed=0)
    twice.load_state_dict(resumed.state_dict())
    assert twice.take(4) == [whole[2], whole[4], whole[5], whole[6]]
    assert twice.state_dict()["open"] == []
