"""Imagined nodes take what fits, in their order, and parts of an engine apart."""

import pytest

from mcore_rl.planning.bundles import ENGINE_NODE, TRAINER_NODE, make_bundle
from mcore_rl.planning.slots import Slot
from mcore_rl.tools.simulate.placement import ImaginedNodes

GPU = make_bundle(1.0, 1)


def names(slots: list[Slot]) -> str:
    return "".join(slot.node.removeprefix("node-") for slot in slots)


def test_bundles_are_packed_in_their_order() -> None:
    nodes = ImaginedNodes(float("inf"), 4)
    trainer, pair, one = nodes.reserve([[GPU] * 6, [make_bundle(2.0, 2)], [GPU]])
    assert names(trainer) == "000011"
    assert names(pair) == "1" and names(one) == "2"
    assert nodes.names == ["node-0", "node-1", "node-2"]
    assert [slot.bundle_index for slot in trainer] == list(range(6))


def test_a_hole_is_filled() -> None:
    nodes = ImaginedNodes(4.0, 0)
    large, small = nodes.reserve([[{"CPU": 3.0}] * 2, [{"CPU": 0.5}] * 5])
    assert names(large) == "01"
    assert names(small) == "00112"


def test_parts_that_are_spread_lie_on_nodes_of_their_own_and_come_first() -> None:
    nodes = ImaginedNodes(float("inf"), 8)
    half = make_bundle(4.0, 4)
    trainer, first, second = nodes.reserve([[GPU] * 4, [half] * 2, [half] * 2], spread=[1, 2])
    assert names(first) == "01" and names(second) == "01"
    assert names(trainer) == "2222"


def test_kinds_of_nodes_are_kept_apart() -> None:
    nodes = ImaginedNodes(float("inf"), 8)
    trainer, engine = nodes.reserve([[{**GPU, TRAINER_NODE: 0.001}], [{**GPU, ENGINE_NODE: 0.001}]])
    assert names(trainer) == "0" and names(engine) == "1"


@pytest.mark.parametrize(
    ("bundle", "message"),
    [
        (make_bundle(1.0, 9), r"reserve 9 GPUs of one machine.*plan\.ranks_per_host=8"),
        ({"CPU": 5.0}, r"reserve 5 CPUs of one machine.*simulate\.cores=4"),
    ],
)
def test_what_is_larger_than_a_node_is_refused(bundle: dict[str, float], message: str) -> None:
    nodes = ImaginedNodes(4.0, 8)
    with pytest.raises(ValueError, match=message):
        nodes.reserve([[bundle]])
