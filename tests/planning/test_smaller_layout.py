"""Which ranks go on after a loss, in which layout, or why none can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.config import ParallelConfig
from mcore_rl.planning.smaller_layout import NoLayoutError, choose_layout, find_namesake


def choose(parallel: ParallelConfig, *lost: int, min_dp: int = 1) -> tuple[int, tuple[int, ...]]:
    left = set(range(parallel.world_size)) - set(lost)
    smaller = choose_layout(parallel, left, min_dp, "parallel")
    return smaller.parallel.dp_size, smaller.places


@pytest.mark.parametrize(
    ("parallel", "lost", "dp", "places"),
    [
        (ParallelConfig(dp=2), (), 2, (0, 1)),
        (ParallelConfig(dp=2), (0,), 1, (1,)),
        (ParallelConfig(dp=4), (1,), 3, (0, 2, 3)),
        (ParallelConfig(dp=4), (1, 2), 2, (0, 3)),
        (ParallelConfig(tp=2, dp=2), (3,), 1, (0, 1)),
        (ParallelConfig(cp=2, dp=3), (2,), 2, (0, 1, 4, 5)),
        (ParallelConfig(tp=2, ep=2, dp=2), (0,), 1, (2, 3)),
        (ParallelConfig(ep=2, dp=4), (0,), 2, (1, 2)),  # 3 is no multiple of ep
        (ParallelConfig(pp=2, dp=3), (1, 5), 2, (0, 2, 3, 4)),
        (ParallelConfig(pp=2, dp=2), (0, 3), 1, (1, 2)),  # of two broken replicas
        (ParallelConfig(pp=2, dp=3), (0, 1, 2), 1, (4, 3)),  # a block moves to another stage
    ],
)
def test_the_largest_legal_layout_of_whole_blocks_goes_on(
    parallel: ParallelConfig, lost: tuple[int, ...], dp: int, places: tuple[int, ...]
) -> None:
    assert choose(parallel, *lost) == (dp, places)


@pytest.mark.parametrize(
    ("parallel", "lost", "min_dp", "message"),
    [
        (ParallelConfig(dp=4), (1, 2), 3, r"2 of 4 ranks .* for parallel.dp=2; .*min_dp=3"),
        (ParallelConfig(tp=2, dp=2), (0, 3), 1, r"parallel.tp \* parallel.cp = 2 .*parallel.dp=0"),
        (ParallelConfig(pp=2), (0,), 1, r"1 of 2 ranks are left.* for parallel.dp=0"),
        (ParallelConfig(ep=4, dp=8), (0,), 5, r"from parallel.dp=5 to 7 .*: parallel.ep .* = 7"),
    ],
)
def test_without_a_legal_layout_the_reason_is_told(
    parallel: ParallelConfig, lost: tuple[int, ...], min_dp: int, message: str
) -> None:
    with pytest.raises(NoLayoutError, match=message):
        choose(parallel, *lost, min_dp=min_dp)


@given(
    parallel=st.builds(
        ParallelConfig,
        tp=st.integers(1, 2),
        cp=st.integers(1, 2),
        pp=st.integers(1, 3),
        dp=st.integers(1, 5),
    ),
    data=st.data(),
)
def test_blocks_stay_whole_and_each_rank_takes_one_place(
    parallel: ParallelConfig, data: st.DataObject
) -> None:
    left = data.draw(st.sets(st.integers(0, parallel.world_size - 1)))
    block = parallel.tp * parallel.cp
    whole = [
        k for k in range(0, parallel.world_size, block) if left.issuperset(range(k, k + block))
    ]
    try:
        smaller = choose_layout(parallel, left, 1, "parallel")
    except NoLayoutError:
        assert len(whole) < parallel.pp
        return
    assert smaller.parallel.dp_size == len(whole) // parallel.pp
    assert len(set(smaller.places)) == len(smaller.places) == smaller.parallel.world_size
    assert left.issuperset(smaller.places)
    for first in range(0, len(smaller.places), block):
        place = smaller.places[first]
        assert place in whole
        assert smaller.places[first : first + block] == tuple(range(place, place + block))


def test_a_namesake_has_the_same_coordinates() -> None:
    earlier, smaller = ParallelConfig(tp=2, pp=2, dp=3), ParallelConfig(tp=2, pp=2, dp=2)
    found = [find_namesake(earlier, smaller, rank) for rank in range(smaller.world_size)]
    assert found == [0, 1, 2, 3, 6, 7, 8, 9]


def test_a_namesake_in_a_smaller_layout_has_the_same_experts() -> None:
    earlier, larger = ParallelConfig(tp=2, ep=2, dp=1), ParallelConfig(tp=2, ep=2, dp=3)
    found = [find_namesake(earlier, larger, rank) for rank in range(larger.world_size)]
    assert found == [0, 1, 0, 1, 0, 1]
    stages = ParallelConfig(pp=2, ep=2, dp=2), ParallelConfig(pp=2, ep=2, dp=4)
    found = [find_namesake(*stages, rank) for rank in range(8)]
    assert found == [0, 1, 0, 1, 2, 3, 2, 3]
