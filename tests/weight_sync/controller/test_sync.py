"""The sync controller: which engines are linked and in rotation; errors that name who and why."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from mcore_rl.tools.doctor.toy_engine import Fault
from mcore_rl.weight_sync.controller.sync import SyncController, SyncError
from mcore_rl.weight_sync.link_end import describe_rank
from mcore_rl.weight_sync.receiver import WeightReceiver
from mcore_rl.weight_sync.wire import Link, Report
from tests.support.thread_engines import ThreadStage, open_thread_stage


class HungReceiver(WeightReceiver):
    """An engine rank that does nothing for some seconds, as if its GPU hung."""

    def handle(self, *args: Any, **kwargs: Any) -> Report:
        time.sleep(5.0)
        return Report("hung")


class DeadRank:
    """A trainer rank that dies once it has told its facts."""

    def describe(self, content: str) -> bytes:
        return describe_rank(torch.device("cpu"), is_sender=True).encode()

    def plan_links(self, offers: Sequence[tuple[Link, bytes]]) -> list[bytes]:
        raise RuntimeError("trainer rank 1 died")


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
        assert [controller.find_version(url) for url in (a, b)] == [1, 2]


def test_engines_of_equal_layouts_agree_on_one_digest() -> None:
    with open_thread_stage(2, 1, 2) as stage:
        controller = make_controller(stage)
        connect(controller, *stage.urls)
        first, other, second = map(controller.get_agreed_layouts, stage.urls)
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


def test_engines_are_linked_at_once_and_one_that_fails_is_named_without_holding_up_others() -> None:
    with open_thread_stage(1, 2, 1, 1) as stage:
        controller = make_controller(stage, timeout_s=20.0)
        good, wide, refusing, broken = stage.engines
        refusing.refused.add("/update_weights_from_tensor")
        broken.models[0].norm = nn.Parameter(torch.zeros(5), requires_grad=False)  # has 12 elements
        began_s = time.monotonic()
        with pytest.raises(SyncError) as caught:
            connect(controller, *stage.urls)
        assert time.monotonic() - began_s < 10.0
        assert set(caught.value.failed) == {refusing.url, broken.url}
        assert "refused /update_weights" in caught.value.failed[refusing.url]
        assert "rank 0 of engine" in caught.value.failed[broken.url]
        assert "norm" in caught.value.failed[broken.url]
        assert controller.linked == (good.url, wide.url)
        assert not any(engine.is_paused or engine.is_updating for engine in stage.engines)
        sync(controller, 1)
        assert good.holds(0) and wide.holds(0)


def test_an_engine_that_hangs_is_named_and_others_are_linked_before_its_deadline() -> None:
    with open_thread_stage(1, 1) as stage:
        controller = make_controller(stage, timeout_s=3.0)
        good, hung = stage.engines
        hung.receivers[0] = HungReceiver()
        with pytest.raises(SyncError) as caught:
            connect(controller, *stage.urls)
        assert controller.linked == (good.url,)
        assert set(caught.value.failed) == {hung.url}
        assert "the controller waited 3." in str(caught.value)
        assert f"for the facts of rank 0 of engine {hung.url}" in str(caught.value)


def test_trainer_ranks_tell_their_facts_once_a_run() -> None:
    with open_thread_stage(1, 1, 1) as stage:
        controller = make_controller(stage)
        connect(controller, *stage.urls)
        connect(controller, stage.urls[0])
        assert stage.trainers.calls.count("describe") == 1
        sync(controller, 1)
        assert all(engine.holds(0) for engine in stage.engines)


def test_a_trainer_rank_that_cannot_join_is_named() -> None:
    with open_thread_stage(1, 1) as stage:
        controller = make_controller(stage)
        senders = stage.trainers._senders
        lost = senders.pop()
        senders.append(DeadRank())
        with pytest.raises(SyncError, match=r"failed: trainer rank 1 died") as caught:
            connect(controller, *stage.urls)
        assert set(caught.value.failed) == set(stage.urls)
        assert controller.linked == ()
        senders[1] = lost
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
