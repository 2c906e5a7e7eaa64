"""Room for all processes of a run, on a Ray that believes in four GPUs."""

from collections.abc import Iterator, Sequence

import pytest
from ray.util.placement_group import remove_placement_group

from mcore_rl.cluster.placement import reserve_in_ray
from mcore_rl.config import ClusterConfig, RolloutConfig, ServedModelConfig
from mcore_rl.planning.bundles import RunSize
from mcore_rl.planning.slots import RunSlots, Slot
from tests.support.imaginary_gpus import four_imaginary_gpus

pytestmark = pytest.mark.e2e

SIZE = RunSize(
    trainer=2, critic=1, engines=1, served={}, engines_colocated=False, critic_colocated=False
)
ROLLOUT = RolloutConfig(tp=1)
CLUSTER = ClusterConfig(cpus_per_rank=0.5)


@pytest.fixture(scope="module", autouse=True)
def four_gpus() -> Iterator[None]:
    with four_imaginary_gpus():
        yield


@pytest.fixture
def reserved(request: pytest.FixtureRequest) -> Iterator[RunSlots]:
    """The slots of the size that the test is parametrized with."""
    slots = reserve_in_ray(request.param, ROLLOUT, CLUSTER, timeout_s=20)
    yield slots
    remove_placement_group(slots.trainer[0].group)


def bundles(slots: Sequence[Slot]) -> list[tuple[int, float, float]]:
    return [(s.bundle_index, s.bundle["CPU"], s.bundle.get("GPU", 0)) for s in slots]


@pytest.mark.parametrize("reserved", [SIZE], indirect=True)
def test_processes_with_gpus_of_their_own_have_bundles_of_their_own(reserved: RunSlots) -> None:
    assert bundles(reserved.trainer) == [(0, 0.5, 1), (1, 0.5, 1)]
    assert bundles(reserved.critic) == [(2, 0.5, 1)]
    assert [bundles(engine) for engine in reserved.engines] == [[(3, 0.5, 1)]]
    assert reserved.served == {}


SHARED = RunSize(
    trainer=2,
    critic=2,
    engines=2,
    served={
        "judge": ServedModelConfig(path="/judge", colocated=True),
        "teacher": ServedModelConfig(path="/teacher"),
    },
    engines_colocated=True,
    critic_colocated=True,
)


@pytest.mark.parametrize("reserved", [SHARED], indirect=True)
def test_processes_that_share_gpus_share_the_trainers_bundles(reserved: RunSlots) -> None:
    share = 0.5 / 4  # of what the trainer's rank, critic, engine and judge have together
    beside_trainer = [(0, share, 0), (1, share, 0)]
    assert bundles(reserved.trainer) == [(0, share, 1), (1, share, 1)]
    assert bundles(reserved.critic) == beside_trainer
    assert [bundles(engine) for engine in reserved.engines] == [[slot] for slot in beside_trainer]
    assert [bundles(engine) for engine in reserved.served["judge"]] == [beside_trainer[:1]]
    assert [bundles(engine) for engine in reserved.served["teacher"]] == [[(2, 0.5, 1)]]


def test_what_does_not_fit_is_refused() -> None:
    five_gpus = RunSize(5, 0, 0, {}, engines_colocated=False, critic_colocated=False)
    with pytest.raises(ValueError, match=r"needs 2.5 CPU and 5 GPU in 5 bundles; after 1 s"):
        reserve_in_ray(five_gpus, ROLLOUT, CLUSTER, timeout_s=1)
