"""Engines that serve several adapters get all of them once, and then the one that was trained."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from mcore_rl.tools.doctor.toy_engine import TINY
from mcore_rl.weight_sync.controller.factor_sync import FactorOptions
from mcore_rl.weight_sync.controller.sync import SyncController, SyncError
from mcore_rl.weights.lora.facts import spell_key
from tests.support.adapted_trainers import AdaptedTrainers, make_factors, make_stamp
from tests.support.thread_engines import ThreadEngine, ThreadStage, open_thread_stage

RANKS = {"ada": 2, "bob": 5, "cy": 1}


@contextmanager
def open_stage(*engine_sizes: int) -> Iterator[tuple[ThreadStage, SyncController]]:
    make = partial(AdaptedTrainers, adapters=RANKS)
    with open_thread_stage(*engine_sizes, make_trainers=make) as stage:
        factors = [
            FactorOptions(make_stamp(TINY, rank), name=name, is_one_of_several=True)
            for name, rank in RANKS.items()
        ]
        controller = SyncController(stage.trainers, timeout_s=20, verify_every=1, factors=factors)
        asyncio.run(controller.connect(stage.urls))
        yield stage, controller


def serves(engine: ThreadEngine, wanted: Mapping[str, tuple[int, int]]) -> bool:
    """Whether each rank serves of each adapter exactly (version, factors of a seed)."""
    for installed in engine.installed:
        newest = {name: (version, factors) for name, version, _, factors in installed}
        assert newest.keys() == RANKS.keys()
        for name, (version, seed) in wanted.items():
            own = make_factors(seed, TINY, torch.float32, RANKS[name])
            found = newest[name][1]
            if newest[name][0] != version:
                return False
            if not all(torch.equal(found[spell_key(key)], value) for key, value in own.items()):
                return False
    return True


def load(stage: ThreadStage, name: str, seed: int) -> None:
    assert isinstance(stage.trainers, AdaptedTrainers)
    stage.trainers.load_adapter(name, seed)


def test_each_sync_brings_the_adapter_that_was_chosen() -> None:
    with open_stage(2, 1) as (stage, controller):
        for seed, name in enumerate(RANKS):
            load(stage, name, seed)
        first = asyncio.run(controller.sync(0))
        assert not first.failed and first.verified == set(stage.urls)
        wanted = {name: (0, seed) for seed, name in enumerate(RANKS)}
        assert all(engine.holds(0) and serves(engine, wanted) for engine in stage.engines)
        moved = {}
        for version, name in enumerate(("bob", "cy", "bob"), start=1):
            load(stage, name, 10 + version)
            controller.choose_adapter(name)
            report = asyncio.run(controller.sync(version))
            assert not report.failed and not report.unchanged
            wanted[name] = version, 10 + version
            assert all(serves(engine, wanted) for engine in stage.engines)
            assert all(engine.version == str(version) for engine in stage.engines)
            moved[name] = report.engines[0].num_bytes
        assert moved["cy"] < moved["bob"] / 2 < first.engines[0].num_bytes

        # An engine that is linked again has none of them.
        asyncio.run(controller.connect([stage.urls[0]]))
        controller.choose_adapter("ada")
        assert not asyncio.run(controller.sync(4)).failed
        assert serves(stage.engines[0], {name: (4, seed) for name, (_, seed) in wanted.items()})
        assert serves(stage.engines[1], wanted | {"ada": (4, 0)})


def test_factors_of_another_adapter_are_refused() -> None:
    with open_stage(1) as (stage, controller):
        assert isinstance(stage.trainers, AdaptedTrainers)
        for several in stage.trainers.several:
            several["bob"] = several["ada"]
        with pytest.raises(SyncError, match=r"of bob|shape|rank"):
            asyncio.run(controller.sync(0))
        assert not controller.linked and "/update_weight_version" not in stage.engines[0].calls
