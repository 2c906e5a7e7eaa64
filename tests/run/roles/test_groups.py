"""Bounded staleness: which groups may begin, which a step takes, and which are too stale."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.loops.sampling import measure_staleness
from mcore_rl.run.roles.finished_groups import SampleGroup
from mcore_rl.run.roles.groups import GroupBuffer
from mcore_rl.types import GroupLease, Prompt, StoredSample, VersionSpan, WeightVersion
from mcore_rl.types.scores import Scores

P = 3
"""Groups of a step."""


def prompt(position: int) -> Prompt:
    return Prompt(position, (1,), (), "unit", "")


def sample(*versions: int, of: int = 0) -> StoredSample:
    """One token of each of `versions`."""
    spans = tuple(VersionSpan(i, i + 1, WeightVersion(v)) for i, v in enumerate(versions))
    return StoredSample(prompt(of), 0, len(spans), "stop", spans, False, GroupLease(0, of))


def finish(buffer: GroupBuffer, group: SampleGroup, *versions: int) -> None:
    buffer.finish(group, [sample(*versions, of=group.position)], Scores([1.0]))


def make(
    bound: int, *, in_order: bool = False, waits: bool = True, version: int = 0
) -> GroupBuffer:
    return GroupBuffer(P, bound, WeightVersion(version), in_order=in_order, waits=waits)


def begin_all(buffer: GroupBuffer) -> list[SampleGroup]:
    return [buffer.begin(i, prompt(i)) for i in range(buffer.room())]


def positions(groups: list[SampleGroup] | None) -> list[int] | None:
    return None if groups is None else [group.position for group in groups]


def test_room_is_for_as_many_steps_as_the_bound_allows() -> None:
    for bound, version in ((0, 0), (1, 0), (2, 7)):
        buffer = make(bound, version=version)
        assert buffer.room() == (bound + 1) * P
        groups = begin_all(buffer)
        assert buffer.room() == 0
        for group in groups:
            finish(buffer, group, version)
        assert positions(buffer.choose()) == [0, 1, 2]
        assert buffer.room() == 0, "taking groups makes room with the next version only"
        buffer.version = WeightVersion(version + 1)
        assert buffer.room() == P
        assert (buffer.num_finished, buffer.num_unfinished) == (bound * P, 0)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_step_may_take_again_as_often_as_it_trains_on_nothing(bound: int) -> None:
    buffer = make(bound, version=5)
    for _ in range(4):
        buffer.begin_step()
        for group in begin_all(buffer):
            finish(buffer, group, 5)
        assert buffer.choose() is not None
    buffer.version = WeightVersion(6)
    assert buffer.room() + len(buffer.list_finished()) == (bound + 1) * P


def test_a_step_takes_what_is_finished_but_waits_for_what_would_be_too_stale() -> None:
    buffer = make(1)
    groups = begin_all(buffer)
    for group in groups[2:]:
        finish(buffer, group, 0)
    assert positions(buffer.choose()) == [2, 3, 4]
    buffer.version = WeightVersion(1)
    for group in begin_all(buffer):
        finish(buffer, group, 1)
    assert buffer.choose() is None, "0 and 1 were begun with version 0 and are not finished"
    finish(buffer, groups[0], 0)
    assert buffer.choose() is None
    finish(buffer, groups[1], 0, 1)
    assert positions(buffer.choose()) == [0, 1, 5]


def test_groups_that_finish_early_do_not_take_the_places_of_others() -> None:
    """Nine groups of version 0 fill the steps up to version 2 and leave no place for version 1."""
    buffer = make(2)
    groups = begin_all(buffer)
    for group in groups[:P]:
        finish(buffer, group, 0)
    assert positions(buffer.choose()) == [0, 1, 2]
    buffer.version = WeightVersion(1)
    for group in begin_all(buffer):
        finish(buffer, group, 1)
    assert buffer.choose() is None
    for group in groups[-P:]:
        finish(buffer, group, 0)
    assert positions(buffer.choose()) == [6, 7, 8]


def test_in_order_the_first_groups_are_taken_whatever_else_is_finished() -> None:
    buffer = make(1, in_order=True)
    groups = begin_all(buffer)
    for group in groups[1:]:
        finish(buffer, group, 0)
    assert buffer.choose() is None
    finish(buffer, groups[0], 0)
    assert positions(buffer.choose()) == [0, 1, 2]


def test_without_waiting_late_groups_are_named_by_their_tokens_or_else_by_their_birth() -> None:
    buffer = make(1, waits=False)
    old, fresh, unfinished = (buffer.begin(i, prompt(i)) for i in range(3))
    finish(buffer, old, 0, 2)
    finish(buffer, fresh, 1, 2)
    buffer.version = WeightVersion(2)
    assert buffer.late() == [old, unfinished]
    buffer.remove(old)
    buffer.remove(unfinished)
    assert buffer.late() == [] and buffer.room() == 4 * P - 1


def chosen_by_a_scan(
    begun: list[SampleGroup], version: int, bound: int, *, waits: bool, in_order: bool
) -> list[SampleGroup] | None:
    """Return what a step takes, by a look at all groups in the order in which they were begun."""
    finished = [group for group in begun if group.is_finished]
    chosen = begun[:P] if in_order else sorted(finished, key=lambda group: group.oldest)[:P]
    if len(chosen) < P or not all(group.is_finished for group in chosen):
        return None
    left = [group for group in begun if group not in chosen]
    for later in range(bound + 1) if waits else ():
        if sum(group.oldest + bound <= version + later for group in left) > later * P:
            return None
    return chosen


@given(bound=st.integers(0, 3), waits=st.booleans(), in_order=st.booleans(), data=st.data())
def test_a_step_takes_what_a_scan_of_all_groups_would_choose(
    bound: int, waits: bool, in_order: bool, data: st.DataObject
) -> None:
    buffer = make(bound, waits=waits, in_order=in_order)
    begun: list[SampleGroup] = []
    version = 0
    for event in data.draw(st.lists(st.sampled_from("bbffffrtv"), max_size=60)):
        unfinished = [group for group in begun if not group.is_finished]
        if event == "b" and buffer.room() > 0:
            begun.append(buffer.begin(len(begun), prompt(len(begun))))
        elif event == "f" and unfinished:
            group = data.draw(st.sampled_from(unfinished))
            finish(buffer, group, data.draw(st.integers(group.born, version)), version)
        elif event == "r" and begun:
            group = data.draw(st.sampled_from(begun))
            buffer.remove(group)
            begun.remove(group)
        elif event == "v":
            version += 1
            buffer.version = WeightVersion(version)
        elif event == "t":
            expected = chosen_by_a_scan(begun, version, bound, waits=waits, in_order=in_order)
            assert buffer.choose() == expected
            begun = [group for group in begun if group not in (expected or [])]
        assert buffer.num_finished == sum(group.is_finished for group in begun)
        assert buffer.num_unfinished == len(begun) - buffer.num_finished


def count_bytecodes(function: Callable[[], object]) -> int:
    """Return how many of Python's instructions the function and all that it calls execute."""
    num = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num
        frame.f_trace_opcodes = True
        num += event == "opcode"
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(earlier)
    return num


@pytest.mark.parametrize("in_order", [False, True])
def test_a_wake_up_of_a_waiting_step_costs_the_same_whatever_is_finished(in_order: bool) -> None:
    """The step waits for a group that would be too stale, or that is the first in order."""
    costs = []
    for num_groups in (50, 400):
        buffer = GroupBuffer(num_groups, 1, WeightVersion(0), in_order=in_order, waits=True)
        groups = begin_all(buffer)
        del groups[num_groups]
        for group in groups:
            finish(buffer, group, 0)
        assert len(buffer.choose() or []) == num_groups
        buffer.version = WeightVersion(1)
        for group in begin_all(buffer):
            finish(buffer, group, 1)
        assert buffer.choose() is None
        assert buffer.num_finished >= num_groups
        costs.append(count_bytecodes(buffer.choose))
    assert costs[0] == costs[1] > 0, "a wake-up looks at the groups that are finished"


@given(
    bound=st.integers(1, 3),
    waits=st.booleans(),
    in_order=st.booleans(),
    data=st.data(),
)
def test_no_step_gets_a_sample_beyond_the_bound(
    bound: int, waits: bool, in_order: bool, data: st.DataObject
) -> None:
    """Groups finish in any order, with tokens of any version that passed.

    Every prompt is trained on once, and the bound is asserted from the spans.
    """
    buffer = make(bound, waits=waits, in_order=in_order)
    under_way: list[SampleGroup] = []
    trained: list[int] = []
    next_position = 0
    again: list[int] = []
    for step in range(5):
        version = WeightVersion(step)
        buffer.version = version
        while buffer.room() > 0:
            position = again.pop() if again else next_position
            next_position = max(next_position, position + 1)
            under_way.append(buffer.begin(position, prompt(position)))
        while True:
            if not waits and not in_order:
                for group in buffer.late():
                    buffer.remove(group)
                    under_way = [g for g in under_way if g is not group]
                    again.append(group.position)
                while buffer.room() > 0 and again:
                    position = again.pop()
                    under_way.append(buffer.begin(position, prompt(position)))
            if (chosen := buffer.choose()) is not None:
                break
            assert under_way, "a step waits, but nothing is under way"
            group = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
            finish(buffer, group, data.draw(st.integers(group.born, version)), version)
        samples = [s for g in chosen for s in g.samples]
        assert len(samples) == P
        metrics = measure_staleness(samples, version, bound)
        assert metrics["staleness/max"] <= bound
        trained += positions(chosen) or []
    assert len(set(trained)) == len(trained) == 5 * P
