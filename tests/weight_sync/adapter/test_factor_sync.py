"""Engines that merge factors themselves hold, bit for bit, what a sync of all weights brings."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from mcore_rl.tools.doctor.toy_engine import (
    TINY,
    Cut,
    Fault,
    ToySizes,
    column_cut,
    expert_cut,
    row_cut,
)
from mcore_rl.weight_sync.controller.factor_sync import FactorOptions
from mcore_rl.weight_sync.controller.sync import SyncController, SyncError
from mcore_rl.weight_sync.controller.sync_report import SyncReport
from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.lora.places import AdapterStamp
from tests.support.adapted_trainers import AdaptedTrainers, holds, make_stamp
from tests.support.thread_engines import ThreadStage, open_thread_stage

TIMEOUT_S = 20.0


@contextmanager
def open_stage(
    *engine_sizes: int,
    cut: Cut = expert_cut,
    num_trainers: int = 2,
    dtype: torch.dtype = torch.float32,
    engine_dtype: torch.dtype = torch.float32,
    sizes: ToySizes = TINY,
    verify_every: int = 0,
    name: str = "",
) -> Iterator[tuple[ThreadStage, SyncController]]:
    make = partial(AdaptedTrainers, cut=cut, dtype=dtype)
    with open_thread_stage(
        *engine_sizes,
        num_trainers=num_trainers,
        dtype=engine_dtype,
        sizes=sizes,
        make_trainers=make,
    ) as stage:
        controller = SyncController(
            stage.trainers,
            timeout_s=TIMEOUT_S,
            verify_every=verify_every,
            factors=[FactorOptions(make_stamp(sizes), name=name)],
        )
        asyncio.run(controller.connect(stage.urls))
        yield stage, controller


def sync(stage: ThreadStage, controller: SyncController, version: int) -> SyncReport:
    stage.trainers.load(version)
    return asyncio.run(controller.sync(version))


@pytest.mark.parametrize(
    ("cut", "engines", "dtype", "engine_dtype"),
    [
        pytest.param(expert_cut, (2, 2, 1), torch.float32, torch.float32, id="experts"),
        pytest.param(row_cut, (3,), torch.bfloat16, torch.bfloat16, id="rows"),
        pytest.param(column_cut, (2,), torch.float32, torch.bfloat16, id="columns"),
    ],
)
def test_engines_hold_the_bits_of_a_full_sync(
    cut: Cut, engines: tuple[int, ...], dtype: torch.dtype, engine_dtype: torch.dtype
) -> None:
    sizes = ToySizes(inner=24, hidden=40)
    options = {"cut": cut, "dtype": dtype, "engine_dtype": engine_dtype, "sizes": sizes}
    with open_stage(*engines, **options, verify_every=1) as (stage, controller):
        num_bytes = []
        for version in range(1, 5):
            report = sync(stage, controller, version)
            assert not report.failed, report.failed
            num_bytes.append(sum(engine.num_bytes for engine in report.engines))
            assert report.verified == set(stage.urls)
            for engine in stage.engines:
                assert holds(engine, version, dtype), (version, engine.url)
                assert engine.version == str(version)
                assert not engine.is_paused
            is_relayed = [result.relay is not None for result in report.engines]
            assert any(is_relayed) == (version == 1 and len(engines) > 2)
        assert len({*num_bytes[1:]}) == 1 and 3 * num_bytes[1] < 2 * num_bytes[0], num_bytes


Held = Sequence[Mapping[Any, Any]]
"""Content of a link -> (shards, tensors), of each trainer rank."""


def held_by(stage: ThreadStage) -> Held:
    assert isinstance(stage.trainers, AdaptedTrainers)
    return stage.trainers.held


EXPERT = "experts.2.up_proj.weight"


def change_shards(change: Callable[[Shard], Shard | None], content: str, held: Held) -> None:
    for of_rank in held:
        shards = of_rank[content][0]
        shards[:] = [new for shard in shards if (new := change(shard)) is not None]


def drop(*keys: str) -> Callable[[Shard], Shard | None]:
    return lambda shard: None if shard.box.name in keys else shard


def reshape(key: str, shape: tuple[int, int]) -> Callable[[Shard], Shard]:
    def change(shard: Shard) -> Shard:
        if shard.box.name != key:
            return shard
        return replace(shard, box=Box(key, (0, 0), shape), strides=(shape[1], 1))

    return change


def grow(key: str, shape: tuple[int, int], held: Held) -> None:
    for of_rank in held:
        if key in of_rank["factors"][1]:
            of_rank["factors"][1][key] = torch.zeros(shape)
    change_shards(reshape(key, shape), "factors", held)


def stamp(changed: AdapterStamp, held: Held) -> None:
    for of_rank in held:
        of_rank["factors"][1]["stamp"].copy_(torch.tensor(changed.encode()))


def other_base(held: Held) -> None:
    """The trainer merges into other weights than those that it says to keep."""
    for of_rank in held:
        for tensor in of_rank["base"][1].values():
            tensor.add_(1)


STAMP = make_stamp(TINY)
A, B = f"{EXPERT}.A", f"{EXPERT}.B"
FAULTS = {
    "dropped": (partial(change_shards, drop(A, B), "factors"), f"lacks the factors.*'{EXPERT}'"),
    "half": (partial(change_shards, drop(B), "factors"), f"has factor A of '{EXPERT}' and no"),
    "transposed": (partial(grow, A, (12, 3)), f"factor A of '{EXPERT}'.*it lies transposed"),
    "doubled": (partial(grow, A, (6, 12)), f"factor A of '{EXPERT}'.*it counts 2 times"),
    "dropped base": (partial(change_shards, drop(EXPERT), "base"), "of 13 matrices, and.* 14"),
    "wrong base": (partial(stamp, replace(STAMP, base="cd" * 32)), "of another base"),
    "wrong alpha": (partial(stamp, replace(STAMP, scale=4.0)), "of scale 4, and this engine"),
    "wrong rank": (partial(stamp, replace(STAMP, rank=4)), "of rank 4, and this engine was"),
}


@pytest.mark.parametrize(("plant", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_a_faulty_adapter_is_refused_when_its_link_is_opened(
    plant: Callable[[Held], None], message: str
) -> None:
    with open_stage(2) as (stage, controller):
        stage.trainers.load(1)
        plant(held_by(stage))
        with pytest.raises(SyncError, match=message):
            asyncio.run(controller.sync(1))
        assert not controller.linked


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(other_base, id="other base"),
        pytest.param(lambda held: held[0]["factors"][1][A].zero_(), id="zeroed shard"),
        pytest.param(lambda held: held[0]["factors"][1][A].mul_(2), id="counted twice"),
    ],
)
def test_an_adapter_that_gives_other_bits_than_the_trainers_is_refused(
    plant: Callable[[Held], None],
) -> None:
    with open_stage(2, num_trainers=1) as (stage, controller):
        stage.trainers.load(1)
        plant(held_by(stage))
        with pytest.raises(SyncError, match=r"are not the trainer's weights: .* lies in") as error:
            asyncio.run(controller.sync(1))
        assert "trainer rank 0 sent" in str(error.value)


def test_stale_factors_are_refused_before_the_swap() -> None:
    with open_stage(2, verify_every=1) as (stage, controller):
        sync(stage, controller, 1)
        kept = [{n: t.clone() for n, t in h["factors"][1].items()} for h in held_by(stage)]
        stage.trainers.load(2)
        for held, old in zip(held_by(stage), kept, strict=True):
            for name, tensor in held["factors"][1].items():
                tensor.copy_(old[name])
        with pytest.raises(SyncError, match=r"of version 2 lies in .* slices differ"):
            asyncio.run(controller.sync(2))
        engine = stage.engines[0]
        assert engine.version == "1" and holds(engine, 1) and not engine.is_paused


def test_an_engine_that_is_linked_again_gets_all_weights_and_then_factors() -> None:
    with open_stage(2, 1) as (stage, controller):
        for version in (1, 2):
            sync(stage, controller, version)
        url = stage.urls[0]
        for model in stage.engines[0].models:
            for parameter in model.parameters():
                parameter.data.fill_(float("nan"))
        asyncio.run(controller.connect([url]))
        report = sync(stage, controller, 3)
        sizes = {result.url: result.num_bytes for result in report.engines}
        assert sizes[url] > 2 * sizes[stage.urls[1]]
        assert all(holds(engine, 3) for engine in stage.engines)
        controller.forget_links()
        asyncio.run(controller.connect(stage.urls))
        for version in (4, 5):
            assert not sync(stage, controller, version).failed
            assert all(holds(engine, version) for engine in stage.engines)


def test_a_changed_byte_of_factors_is_refused_and_the_engine_serves_on() -> None:
    with open_stage(1) as (stage, controller):
        name = f"{stage.urls[0]} (factors)"
        stage.faults["", name] = Fault(rank=0, message=1, kind="corrupt")
        sync(stage, controller, 1)
        with pytest.raises(SyncError, match="no engine took version 2"):
            sync(stage, controller, 2)
        assert holds(stage.engines[0], 1) and not stage.engines[0].is_paused


def test_weights_of_minus_zero_are_those_of_a_run_that_begins() -> None:
    """Its factors are zeros, and its weights those of the files; FP8 has many of -0."""
    with open_stage(2, 1) as (stage, controller):
        for held in held_by(stage):
            for _, tensors in (held["base"], held["weights"]):
                for tensor in tensors.values():
                    tensor[::2] = -0.0
        report = asyncio.run(controller.sync(0))
        assert not report.failed, report.failed
        assert not sync(stage, controller, 1).failed
