"""Faults planted after every slice was verified: `sync.verify=destination` finds them.

It reads the engine's live parameters back before the engine serves them.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from mcore_rl.run.roles.parity_tolerance import NUM_TO_JUDGE
from mcore_rl.tools.doctor.toy_engine import FusedEngine, ToySizes, make_tensors
from mcore_rl.weight_sync.connection import DestinationCheck, SentSums
from mcore_rl.weight_sync.controller.linked_engine import VERIFIED_FIRST
from mcore_rl.weight_sync.controller.strategy import StagedSync, SyncTarget
from mcore_rl.weight_sync.controller.sync import SyncController, SyncError
from mcore_rl.weight_sync.receiver import WeightReceiver
from mcore_rl.weight_sync.verify import XXH3
from mcore_rl.weight_sync.waits import TransferError
from tests.support.link_ends import make_link, open_ends
from tests.support.thread_engines import ThreadEngine, ThreadStage, open_thread_stage

TIMEOUT_S = 60.0
SIZES = ToySizes(experts=128)
DTYPES = [torch.float32, torch.bfloat16]

Plant = Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None]
"""Changes the parameters that an engine is about to serve; also gets those that it served."""


def swap_an_expert(new: dict[str, torch.Tensor], old: dict[str, torch.Tensor]) -> None:
    """One expert of 128 gets the weights of another."""
    new["w2"][77].copy_(new["w2"][78])


def zero_a_slice(new: dict[str, torch.Tensor], old: dict[str, torch.Tensor]) -> None:
    """Two rows of a projection are never written."""
    new["qkv"][4:6].zero_()


def keep_old_weights(new: dict[str, torch.Tensor], old: dict[str, torch.Tensor]) -> None:
    """The engine goes on with the weights of the version before, under the new name."""
    for name, tensor in new.items():
        tensor.copy_(old[name])


PLANTS = {
    "expert": (swap_an_expert, r"experts\.77\.down_proj"),
    "zeroed slice": (zero_a_slice, r"attn\.q_proj\.weight"),
    "stale": (keep_old_weights, r"of \d+ slices differ"),
}


@dataclass
class Planting:
    """A fault for some versions, planted in the engine's first rank."""

    engine: ThreadEngine
    plant: Plant
    versions: Sequence[int]

    def into(self, version: int, new: dict[str, torch.Tensor]) -> None:
        if version in self.versions:
            model = self.engine.models[0]
            old = {name: p.detach().clone() for name, p in model.named_parameters()}
            self.plant(new, old)


class PlantingSync(StagedSync):
    """Plants a fault between the last checksum in flight and the swap."""

    planting: Planting

    async def _try_swap(self, target: SyncTarget, version: int, deadline_s: float) -> str | None:
        staging = self.planting.engine.receivers[0]._staging
        assert staging is not None
        self.planting.into(version, staging.tensors)
        return await super()._try_swap(target, version, deadline_s)


def make_controller(stage: ThreadStage, planting: Planting, verify_every: int) -> SyncController:
    controller = SyncController(stage.trainers, timeout_s=TIMEOUT_S, verify_every=verify_every)
    strategy = PlantingSync(stage.trainers, TIMEOUT_S, controller._mixed, None, verify_every)
    strategy.planting = planting
    controller._strategy = strategy
    asyncio.run(controller.connect(stage.urls))
    return controller


def sync(stage: ThreadStage, controller: SyncController, version: int) -> frozenset[str]:
    stage.trainers.load(version)
    report = asyncio.run(controller.sync(version))
    assert not report.failed
    return report.verified


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("plant", "named"), PLANTS.values(), ids=PLANTS.keys())
def test_a_fault_behind_the_last_checksum_is_found_before_the_engine_serves_it(
    plant: Plant, named: str, dtype: torch.dtype
) -> None:
    with open_thread_stage(1, dtype=dtype, sizes=SIZES) as stage:
        (engine,) = stage.engines
        controller = make_controller(stage, Planting(engine, plant, [2]), verify_every=1)
        assert sync(stage, controller, 1) == {engine.url}
        assert engine.holds(1)
        stage.trainers.load(2)
        with pytest.raises(SyncError, match=named) as caught:
            asyncio.run(controller.sync(2))
        assert "of version 2 lies in" in str(caught.value) or "differ" in str(caught.value)
        assert f"rank 0 of engine {engine.url}" in str(caught.value)
        assert engine.is_paused and engine.version == "1"
        assert controller.linked == ()

        asyncio.run(controller.connect(stage.urls))
        assert sync(stage, controller, 3) == {engine.url}
        assert engine.holds(3) and not engine.is_paused


@pytest.mark.parametrize(("plant", "_named"), PLANTS.values(), ids=PLANTS.keys())
def test_without_reading_back_the_same_faults_are_served(plant: Plant, _named: str) -> None:
    with open_thread_stage(1, sizes=SIZES) as stage:
        (engine,) = stage.engines
        controller = make_controller(stage, Planting(engine, plant, [2]), verify_every=0)
        assert sync(stage, controller, 1) == set()
        sync(stage, controller, 2)
        assert engine.version == "2" and not engine.holds(2) and not engine.is_paused


def test_the_first_syncs_of_a_link_are_read_back_and_every_so_many_after_them() -> None:
    with open_thread_stage(1, 2) as stage:
        controller = SyncController(stage.trainers, timeout_s=TIMEOUT_S, verify_every=3)
        asyncio.run(controller.connect(stage.urls))
        first, second = stage.urls
        read_back = [sync(stage, controller, version) for version in range(1, 9)]
        both = {first, second}
        assert VERIFIED_FIRST == NUM_TO_JUDGE == 4
        assert read_back == [both, both, both, both, set(), set(), both, set()]
        asyncio.run(controller.connect([first]))
        assert sync(stage, controller, 9) == {first}


class PlantingReceiver(WeightReceiver):
    """Receives in place; after a transfer something zeroes a part of a parameter."""

    model: FusedEngine

    def plant(self) -> None:
        def zero() -> None:
            self.model.w13.data[3, :2].zero_()

        self._fill_padding = zero


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_received_in_place_are_read_back_too(dtype: torch.dtype) -> None:
    with open_thread_stage(1, dtype=dtype) as stage:
        (engine,) = stage.engines
        receiver = PlantingReceiver()
        receiver.model = engine.models[0]
        engine.receivers[0] = receiver
        controller = SyncController(
            stage.trainers, timeout_s=TIMEOUT_S, staged=False, verify_every=1
        )
        asyncio.run(controller.connect(stage.urls))
        assert sync(stage, controller, 1) == {engine.url} and engine.holds(1)
        receiver.plant()
        stage.trainers.load(2)
        with pytest.raises(SyncError, match=r"experts\.3\.gate_proj\.weight .* lies in w13"):
            asyncio.run(controller.sync(2))
        assert engine.is_paused and engine.version == "1"


def test_relays_and_the_engines_behind_them_are_read_back() -> None:
    with open_thread_stage(2, 2) as stage:
        controller = SyncController(stage.trainers, timeout_s=TIMEOUT_S, verify_every=1)
        asyncio.run(controller.connect(stage.urls))
        for version in (1, 2, 3):
            assert sync(stage, controller, version) == set(stage.urls)
            assert all(engine.holds(version) for engine in stage.engines)


def test_a_version_that_brings_the_same_bytes_shows() -> None:
    with open_thread_stage(1, 1) as stage:
        controller = SyncController(stage.trainers, timeout_s=TIMEOUT_S)
        asyncio.run(controller.connect(stage.urls))
        stage.trainers.load(1)
        report = asyncio.run(controller.sync(1))
        assert report.unchanged == () and "sync/changed_share" not in report.metrics()
        report = asyncio.run(controller.sync(2))
        assert report.unchanged == tuple(stage.urls)
        assert report.metrics()["sync/changed_share"] == 0.0
        stage.trainers.load(3)
        report = asyncio.run(controller.sync(3))
        assert report.unchanged == () and report.metrics()["sync/changed_share"] == 1.0
        stage.trainers._tensors[0]["local.norm.weight"][0] += 1
        stage.trainers._tensors[1]["local.norm.weight"][0] += 1
        report = asyncio.run(controller.sync(4))
        num_slices = report.engines[0].num_slices
        assert report.metrics()["sync/changed_share"] == 1 / num_slices
        assert num_slices == len(make_tensors())


def test_checksums_of_buckets_are_joined_and_compared_with_those_before() -> None:
    before = SentSums.join(1, [torch.tensor([5, 6]), torch.tensor([7])])
    now = SentSums.join(2, [torch.tensor([5, 8]), torch.tensor([9])])
    assert now.sums_P.tolist() == [5, 8, 9] and now.count_changed(before) == 2
    assert SentSums.join(3, []).count_changed(SentSums.join(2, [])) == 0


def test_another_version_than_the_one_received_is_refused() -> None:
    _store, link = make_link()
    check = DestinationCheck(open_ends(link)[1], [], XXH3)
    check.check(3, {}, SentSums.join(3, []))
    for sent, held in ((None, "none"), (SentSums.join(2, []), "2")):
        with pytest.raises(TransferError, match=f"was to verify version 3, but received {held}"):
            check.check(3, {}, sent)
