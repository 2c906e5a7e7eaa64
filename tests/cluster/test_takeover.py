"""Copies of earlier ranks are found with their keepers and brought to the ranks that need them."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray
import torch

from mcore_rl.cluster.session import open_ray_session
from mcore_rl.cluster.state_keepers import StateKeepers
from mcore_rl.cluster.takeover import EarlierRanks, NewRanks, take_over
from mcore_rl.config import ClusterConfig, ParallelConfig
from mcore_rl.process.kept_copies import Span, encode_index
from mcore_rl.train.recovery.rank_state import Generation, count_bytes, place_tensors

pytestmark = pytest.mark.e2e
EARLIER = EarlierRanks(ParallelConfig(dp=3), ("a", "b", "c"))
STATE_B = torch.arange(60, dtype=torch.uint8)
BEFORE = [(0, 20), (20, 40), (40, 60)]
AFTER = [(0, 30), (30, 60)]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with open_ray_session(ClusterConfig(object_store_mib=80), num_cpus=1):
        yield


@pytest.fixture(params=["controller", "actors"])
def keepers(request: pytest.FixtureRequest) -> Iterator[StateKeepers]:
    """Keepers of one node: the controller itself, or as with several nodes an actor."""
    nodes = [node_id()] if request.param == "controller" else [node_id(), "another"]
    made = StateKeepers(nodes, timeout_s=60.0)
    yield made
    made.close()


def node_id() -> str:
    return ray.get_runtime_context().get_node_id()


def index_of(start: int, stop: int) -> bytes:
    [(place, _)], _ = place_tensors([STATE_B[start:stop]])
    return encode_index([Span("weights", start, stop, place)])


def reserve(
    keepers: StateKeepers, names: Sequence[str], parts: Sequence[tuple[int, int]]
) -> list[list[Generation]]:
    sizes = {
        name: count_bytes([STATE_B[slice(*part)]], index_of(*part))
        for name, part in zip(names, parts, strict=True)
    }
    paths = keepers.reserve(sizes, dict.fromkeys(names, node_id()))
    return [[Generation(path) for path in paths[name]] for name in names]


def keep(copies: Sequence[Sequence[Generation]], k: int, step: int) -> None:
    """Have earlier ranks write their copy `k`, after `step` steps that each add 1."""
    for rank, (start, stop) in enumerate(BEFORE):
        state_B = STATE_B[start:stop] + step
        copies[rank][k].write(step, f"of {rank}".encode(), [state_B], index_of(start, stop))


def test_new_ranks_compose_each_step_that_all_earlier_ones_have(keepers: StateKeepers) -> None:
    copies = reserve(keepers, EARLIER.names, BEFORE)
    keep(copies, 0, step=4)
    keep(copies, 1, step=5)
    keepers.retire(EARLIER.names)
    made = reserve(keepers, ("x", "y"), AFTER)
    composed: list[Any] = []

    def compose_each(method: str, arguments: Sequence[Sequence[Any]], /) -> list[int]:
        assert method == "compose_state"
        for rank, (step, paths, like) in enumerate(arguments):
            sources = {name: Generation(path) for name, path in paths.items()}
            part = AFTER[rank]
            tensors = [STATE_B[slice(*part)].clone()]
            target = made[rank][step - 4]
            target.compose(step, tensors, index_of(*part), sources, like)
            small = target.read(step, tensors)
            composed.append((rank, step, sorted(paths), small, tensors[0]))
        return [step - 4 for step, _, _ in arguments]

    indexes = [index_of(*part) for part in AFTER]
    ranks = NewRanks(ParallelConfig(dp=2), [node_id()] * 2, indexes)
    lost = EarlierRanks(ParallelConfig(dp=2), ("lost before it kept anything",))
    assert take_over([EARLIER, lost], ranks, keepers, compose_each) == [[0, 0], [1, 1]]
    told = [(rank, step, names, small) for rank, step, names, small, _ in composed]
    assert told == [
        (0, 4, ["a", "b"], b"of 0"),
        (1, 4, ["b", "c"], b"of 1"),
        (0, 5, ["a", "b"], b"of 0"),
        (1, 5, ["b", "c"], b"of 1"),
    ]
    for rank, step, _, _, state_B in composed:
        assert torch.equal(state_B, STATE_B[slice(*AFTER[rank])] + step)
    keepers.release(EARLIER.names)
    assert keepers.list_copies(EARLIER.names) == {name: {} for name in EARLIER.names}


def test_a_step_of_which_a_rank_has_no_copy_is_not_taken_over(keepers: StateKeepers) -> None:
    copies = reserve(keepers, EARLIER.names, BEFORE)
    keep(copies, 0, step=4)
    copies[1][0].clear()
    keepers.retire(EARLIER.names)
    nobody = NewRanks(ParallelConfig(dp=2), [], [])
    assert take_over([EARLIER], nobody, keepers, lambda method, arguments: []) == []
