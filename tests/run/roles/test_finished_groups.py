"""Which finished groups a step takes next, in both orders, and after some were discarded."""

from mcore_rl.run.roles.finished_groups import InOrder, OldestFirst, SampleGroup
from mcore_rl.types import Prompt, WeightVersion


def make_groups(*oldest: int) -> list[SampleGroup]:
    """Return groups begun one after the other, with their oldest tokens from these versions."""
    groups = []
    for number, version in enumerate(oldest):
        prompt = Prompt(number, (1,), (), "unit", "")
        group = SampleGroup(number, prompt, WeightVersion(0), number)
        group.oldest = WeightVersion(version)
        groups.append(group)
    return groups


def numbers(groups: list[SampleGroup]) -> list[int]:
    return [group.number for group in groups]


def test_the_oldest_tokens_are_taken_first_and_then_the_first_begun() -> None:
    order = OldestFirst()
    groups = make_groups(1, 0, 1, 0, 2)
    for group in reversed(groups):
        order.begin(group)
        order.finish(group)
    assert numbers(order.take(4)) == [1, 3, 0, 2]
    assert order.count(3) == {0: 2, 1: 1} and order.count(6) is None
    order.discard(groups[3])
    assert numbers(order.take(3)) == [1, 0, 2]


def test_in_order_nothing_passes_a_group_that_is_not_finished() -> None:
    order = InOrder()
    groups = make_groups(0, 2, 1, 0)
    for group in groups:
        order.begin(group)
    for group in (groups[3], groups[1], groups[2]):
        order.finish(group)
    assert order.count(1) is None
    order.discard(groups[2])
    order.finish(groups[0])
    assert order.count(3) == {0: 2, 2: 1} and numbers(order.take(3)) == [0, 1, 3]
    order.discard(groups[0])
    assert numbers(order.take(2)) == [1, 3] and order.count(3) is None


def test_in_order_a_group_that_is_given_up_holds_nothing_back() -> None:
    order = InOrder()
    groups = make_groups(0, 0)
    for group in groups:
        order.begin(group)
    order.finish(groups[1])
    assert order.count(1) is None
    order.discard(groups[0])
    assert order.count(1) == {0: 1} and numbers(order.take(1)) == [1]
