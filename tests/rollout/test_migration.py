"""Which response moves to which engine, and how it goes on."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

from mcore_rl.rollout.engine_health import EngineLoad
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.migration import Migration, UnderWay, continue_request
from mcore_rl.rollout.request import EngineAffinity, Request
from mcore_rl.types import Prompt, Sample, VersionSpan, WeightVersion
from tests.support.image_prompts import make_image

REQUEST = Request(Prompt(7, (3, 4), (), "unit", None), 0, EngineAffinity(4))


class Aborts:
    """Notes what engines are asked to end."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    async def abort(self, engine: EngineAddress, rid: str) -> None:
        self.asked.append((engine.url, rid))


def asked_to_end(gap: int, loads: Sequence[int], num_looks: int = 1) -> list[tuple[str, str]]:
    """Return what engines with so many requests are asked to end, all looks together."""
    aborts = Aborts()

    async def look() -> None:
        migration = Migration(gap)
        engines = [EngineLoad(EngineAddress(str(k), "")) for k in range(len(loads))]
        with ExitStack() as stack:
            for engine, load in zip(engines, loads, strict=True):
                for n in range(load):
                    stack.enter_context(engine.request())
                    stack.enter_context(
                        migration.note(UnderWay(engine, f"{engine.address.url}{n}"))
                    )
            for _ in range(num_looks):
                migration.maybe_move(engines, cast(Any, aborts))
            await asyncio.sleep(0)

    asyncio.run(look())
    return aborts.asked


def test_the_newest_of_the_busiest_engine_moves_if_the_gap_is_reached() -> None:
    assert asked_to_end(4, [2, 6, 3]) == [("1", "15")]
    assert asked_to_end(5, [2, 6, 3]) == []


def test_one_moves_at_a_time() -> None:
    assert asked_to_end(2, [0, 8], num_looks=3) == [("1", "17")]


def test_nothing_moves_to_where_it_came_from() -> None:
    """With a gap of one the two engines would swap their loads for ever."""
    assert asked_to_end(1, [1, 2]) == []
    assert asked_to_end(1, [1, 3]) == [("1", "12")]


def test_nothing_moves_without_a_gap_or_another_engine() -> None:
    assert asked_to_end(0, [0, 9]) == []
    assert asked_to_end(1, [9]) == []


def test_requests_that_end_at_texts_stay() -> None:
    migration = Migration(2)
    first = migration.name_request(REQUEST)
    assert first.rid and first.rid != migration.name_request(REQUEST).rid
    assert not migration.name_request(
        Request(REQUEST.prompt, 0, REQUEST.affinity, stop=("end",))
    ).rid


def test_requests_with_images_stay() -> None:
    prompt = replace(REQUEST.prompt, images=(make_image("a"),))
    assert not Migration(2).name_request(Request(prompt, 0, REQUEST.affinity)).rid
    assert not Migration(0).name_request(REQUEST).rid


def test_a_moved_request_keeps_what_was_drawn_and_forgets_its_engine() -> None:
    REQUEST.affinity.engine = "busy"
    span = VersionSpan(0, 1, WeightVersion(2))
    begun = Sample(REQUEST.prompt, 0, (8,), (-0.5,), "abort", (span,), "")
    once = continue_request(REQUEST, begun)
    assert once.begun is begun and once.affinity.engine is None
    assert once.affinity.num_requests == 0
    assert continue_request(once, None).begun is begun, "the second engine had drawn nothing"
