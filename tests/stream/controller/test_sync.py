"""The sync controller: which engines are linked and in rotation; errors that name who and why."""

import asyncio

import pytest

from mcore_rl.doctor.sync_scene import Fault
from mcore_rl.stream.controller.sync import SyncController, SyncError
from tests.support.thread_engines import ThreadStage, open_thread_stage


def make_controller(stage: ThreadStage, timeout_s: float = 60.0) -> SyncController:
    return SyncController(stage.trainers, timeout_s=timeout_s)


def connect(controller: SyncController, *urls: str) -> None:
    asyncio.run(controller.connect(urls))


def sync(controller: SyncController, version: int, *urls: str) -> None:
    assert not asyncio.run(controller.sync(version, urls or None)).failed


def test_a_linked_engine_is_in_rotation_only_with_the_newest_version() -> None:
    with open_thread_stage(1, 2) as stage:
        controller = make_controller(stage)
        a, b = stage.urls
        connect(controller, a)
        assert (controller.linked, controller.in_rotation) == ((a,), ())
        sync(controller, 1)
        assert controller.in_rotation == (a,)
        connect(controller, b)
        assert (controller.linked, controller.in_rotation) == ((a, b), (a,))
        sync(controller, 1, b)
        assert controller.in_rotation == (a, b)
        sync(controller, 2, b)
        assert controller.in_rotation == (b,)
        assert [controller.served_version(url) for url in (a, b)] == [1, 2]


def test_engines_of_equal_layouts_agree_on_one_digest() -> None:
    with open_thread_stage(2, 1, 2) as stage:
        controller = make_controller(stage)
        connect(controller, *stage.urls)
        first, other, second = map(controller.agreed_layouts, stage.urls)
        assert first == second != other
        assert first.startswith("listed ")


def test_only_linked_engines_can_be_synced() -> None:
    with open_thread_stage(1) as stage:
        controller = make_controller(stage)
        with pytest.raises(SyncError, match=r"cannot sync \[\]: linked engines are \[\]"):
            sync(controller, 1)
        connect(controller, *stage.urls)
        with pytest.raises(SyncError, match=r"cannot sync \['http://e'\]: linked engines are \['h"):
            sync(controller, 1, "http://e")


def test_an_engine_that_cannot_be_linked_is_named_and_others_keep_their_links() -> None:
    with open_thread_stage(1, 1) as stage:
        controller = make_controller(stage)
        good, bad = stage.engines
        connect(controller, good.url)
        bad.refused.add("/begin_weight_update")
        with pytest.raises(
            SyncError, match=rf"engine {bad.url} cannot be linked: .* refused /begin_weight_update"
        ):
            connect(controller, bad.url)
        assert controller.linked == (good.url,)
        sync(controller, 1)
        assert good.holds(0)


def test_a_trainer_rank_that_cannot_join_is_named() -> None:
    with open_thread_stage(1) as stage:
        controller = make_controller(stage)
        senders = stage.trainers._senders
        lost = senders.pop()
        assert stage.trainers.world_size == 2
        short = SyncController(stage.trainers, timeout_s=3.0)
        with pytest.raises(SyncError, match=r"cannot be linked: .*layout of .*trainer rank 1"):
            connect(short, *stage.urls)
        senders.append(lost)
        connect(controller, *stage.urls)
        sync(controller, 1)


def test_a_sync_that_fails_on_all_engines_is_an_error_and_unlinks_them() -> None:
    with open_thread_stage(1) as stage:
        controller = make_controller(stage)
        (engine,) = stage.engines
        stage.faults["", engine.url] = Fault(rank=1, message=0, kind="corrupt")
        connect(controller, engine.url)
        with pytest.raises(SyncError, match=r"no engine took version 4: .*has checksum"):
            sync(controller, 4)
        assert controller.linked == ()
        stage.faults.clear()
        connect(controller, engine.url)
        sync(controller, 4)
        assert controller.in_rotation == (engine.url,)
