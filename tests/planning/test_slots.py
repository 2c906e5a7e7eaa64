"""Slots of ranks and engines that share GPUs, and what is refused."""

from typing import Any

import pytest

from mcore_rl.planning.slots import (
    RunSlots,
    Slot,
    check_tensor_parallel,
    colocate_engines,
    divide,
    share_cores,
)

NO_GROUP: Any = None


def slots_on(nodes: str) -> list[Slot]:
    return [Slot(NO_GROUP, i, {"CPU": 2.0, "GPU": 1}, node) for i, node in enumerate(nodes)]


@pytest.mark.parametrize(
    ("nodes", "num_engines", "ranks_per_engine", "num_nodes", "expected"),
    [
        ("aaaabbbb", 4, 2, 0, [[0], [2], [4], [6]]),
        ("aaaabbbb", 1, 8, 0, [[0, 4]]),
        ("aaaabbbb", 1, 8, 4, [[0, 2, 4, 6]]),
        ("aaaa", 1, 2, 0, [[0]]),
    ],
)
def test_engines_lie_beside_the_ranks_in_order(
    nodes, num_engines, ranks_per_engine, num_nodes, expected
) -> None:
    trainer = divide(slots_on(nodes), 2)
    engines = colocate_engines(trainer, num_engines, ranks_per_engine, num_nodes)
    assert [slot.bundle for slot in trainer] == [{"CPU": 1.0, "GPU": 1}] * len(nodes)
    assert [[slot.bundle_index for slot in engine] for engine in engines] == expected
    assert {slot.bundle["CPU"] for engine in engines for slot in engine} == {1.0}
    assert not any("GPU" in slot.bundle for engine in engines for slot in engine)


@pytest.mark.parametrize(("nodes", "ranks_per_engine"), [("aaab", 4), ("aaabbb", 2)])
def test_an_engine_across_a_border_of_nodes_is_refused(nodes: str, ranks_per_engine: int) -> None:
    with pytest.raises(
        ValueError, match=r"GPUs are shared, but training ranks \d to \d lie on 2 nodes"
    ):
        colocate_engines(slots_on(nodes), len(nodes) // ranks_per_engine, ranks_per_engine)


def test_a_tensor_parallel_group_lies_on_one_node() -> None:
    check_tensor_parallel(slots_on("aabbb"), 1, "parallel.tp")
    check_tensor_parallel(slots_on("aaaabb"), 2, "parallel.tp")
    with pytest.raises(
        ValueError,
        match=r"critic.parallel.tp=2: ranks 2 to 3 .* room for 1 on node a and 1 on node b. Free",
    ):
        check_tensor_parallel(slots_on("aaabbb"), 2, "critic.parallel.tp")


@pytest.mark.parametrize(
    ("in_turns", "trainer", "engines", "judges"),
    [(True, [2, 2, 1], [2, 1], [2]), (False, [4, 4, 2], [4, 2], [4])],
)
def test_a_phase_has_the_cores_of_its_node(in_turns, trainer, engines, judges) -> None:
    slots = RunSlots(
        slots_on("aab"),
        [],
        [slots_on("a"), slots_on("b")],
        {"judge": [slots_on("a")]},
    )
    shared = share_cores(slots, in_turns=in_turns)
    assert [slot.sharers for slot in shared.trainer] == trainer
    assert [slot.sharers for [slot] in shared.engines] == engines
    assert [slot.sharers for [slot] in shared.served["judge"]] == judges


def test_a_critic_trains_beside_the_policy() -> None:
    slots = RunSlots(slots_on("a"), slots_on("a"), [slots_on("a")], {})
    shared = share_cores(slots, in_turns=True)
    assert [shared.trainer[0].sharers, shared.critic[0].sharers] == [2, 2]
    assert shared.engines[0][0].sharers == 1
