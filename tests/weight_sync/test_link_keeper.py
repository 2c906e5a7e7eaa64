"""Agreement of all ranks as a link's keeper joins it: reasons, and two names where they differ."""

import pytest

from mcore_rl.weight_sync.link_store import (
    DATA,
    ERROR,
    LISTED_PLAN,
    RECORDED_PLAN,
    PlanAnswer,
    join_answers,
    keep_link,
    make_joined_key,
    make_rank_key,
)
from mcore_rl.weight_sync.store.server import Values
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.wire import Link

LINK = Link("e", "", 0, "", 2, 1, 1, 1.0)
A, B, C = ("a" * 16, "b" * 16, "c" * 16)
AGREED = [PlanAnswer.make({2: A}), PlanAnswer.make({2: B}), PlanAnswer.make({0: A, 1: B})]


def test_ranks_agree_if_both_ends_of_each_pair_planned_the_same() -> None:
    assert join_answers(AGREED, LINK.names) == ""


@pytest.mark.parametrize(
    ("rank", "digests", "message"),
    [
        (2, {0: A, 1: C}, f"trainer rank 1 and rank 0 of engine e made .* pair: {B}, {C}$"),
        (2, {0: A}, f"trainer rank 1 and rank 0 of engine e made .* pair: {B}, None$"),
        (0, {}, f"trainer rank 0 and rank 0 of engine e made .* pair: None, {A}$"),
        (2, {}, f"trainer rank 0 and rank 0 of engine e made .* pair: {A}, None$"),
        (0, {1: A}, f"trainer rank 0 and trainer rank 1 made .* pair: {A}, None$"),
    ],
)
def test_both_ranks_of_a_pair_that_differs_are_named(
    rank: int, digests: dict[int, str], message: str
) -> None:
    answers = list(AGREED)
    answers[rank] = PlanAnswer.make(digests)
    with pytest.raises(TransferError, match=message):
        join_answers(answers, LINK.names)


def test_problems_of_recorded_layouts_are_told_by_rank_and_bounded() -> None:
    answers = [AGREED[0], PlanAnswer("no layer 3"), AGREED[2]]
    assert join_answers(answers, LINK.names) == "trainer rank 1: no layer 3"
    many = join_answers([PlanAnswer("no")] * 6, [f"rank {rank}" for rank in range(6)])
    assert many == "rank 0: no; rank 1: no; rank 2: no; rank 3: no; and 2 more ranks"


def test_answers_are_joined_when_the_last_is_there_and_then_forgotten() -> None:
    values = Values()
    keep_link(values, LINK)
    for rank, answer in enumerate(AGREED):
        assert values.get(make_joined_key(RECORDED_PLAN)) is None
        values.set(make_rank_key(RECORDED_PLAN, rank), DATA + answer.encode())
    assert values.get(make_joined_key(RECORDED_PLAN)) == DATA
    assert values.count() == 1


def test_listed_plans_are_compared_once_the_recorded_layouts_have_problems() -> None:
    values = Values()
    keep_link(values, LINK)
    for rank in range(3):
        values.set(make_rank_key(RECORDED_PLAN, rank), DATA + PlanAnswer("no").encode())
    assert values.get(make_joined_key(RECORDED_PLAN)) == DATA + (
        b"trainer rank 0: no; trainer rank 1: no; rank 0 of engine e: no"
    )
    for rank, answer in enumerate(AGREED):
        values.set(make_rank_key(LISTED_PLAN, rank), DATA + answer.encode())
    assert values.get(make_joined_key(LISTED_PLAN)) == DATA


def test_an_error_in_place_of_an_answer_is_told_to_all() -> None:
    values = Values()
    keep_link(values, LINK)
    values.set(make_rank_key(RECORDED_PLAN, 1), ERROR + b"out of memory")
    for rank in (0, 2):
        values.set(make_rank_key(RECORDED_PLAN, rank), DATA + AGREED[rank].encode())
    joined = values.get(make_joined_key(RECORDED_PLAN))
    assert joined == ERROR + b"trainer rank 1 failed: out of memory"
