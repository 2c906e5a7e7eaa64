"""Syncs to real SGLang engines: parameters bit for bit, versions, faults, requests in flight."""

import asyncio
import math
from collections.abc import Iterator

import pytest

from mcore_rl.run.roles.colocation import EngineMemory
from mcore_rl.tools.doctor.toy_engine import Fault
from mcore_rl.weight_sync.controller.sync import SyncError
from tests.support.engine_keys import KEYS
from tests.support.sync_stage import (
    Stage,
    checksums,
    checksums_after_loading,
    generate,
    generate_across,
    logprob_error,
    open_stage,
    served_version,
)

pytestmark = pytest.mark.e2e
MOST_TOKENS = 1000
"""The model has positions for a few more."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """An engine of one rank and one of two."""
    with open_stage(tmp_path_factory.mktemp("sync"), (1, 2), timeout_s=30) as stage:
        yield stage


def test_every_parameter_is_bit_for_bit_what_sglang_itself_loads_from_the_checkpoint(
    stage: Stage,
) -> None:
    expected = {url: checksums_after_loading(url, stage.checkpoints[1]) for url in stage.urls}
    for url in stage.urls:
        before = checksums_after_loading(url, stage.checkpoints[0])
        for old, wanted in zip(before, expected[url], strict=True):
            assert all(old[name] != wanted[name] for name in wanted)
    report = stage.sync(1)
    assert not report.failed
    assert report.engines[1].num_bytes >= report.engines[0].num_bytes > 0
    for url in stage.urls:
        for found, wanted in zip(checksums(url), expected[url], strict=True):
            assert {name for name in wanted if found[name] != wanted[name]} == set()
        assert served_version(url) == "1"
        answer = generate(url)
        assert answer["meta_info"]["weight_version"] == "1"
        assert (
            logprob_error(stage.checkpoints[1], answer)
            < 1e-4
            < logprob_error(stage.checkpoints[0], answer)
        )


def test_engines_release_memory_once_idle_and_serve_again_after_a_sync(stage: Stage) -> None:
    memory = EngineMemory(stage.urls, timeout_s=120, keys=KEYS)
    stage.sync(1)
    answer = generate_across(stage.urls[0], lambda: asyncio.run(memory.for_training()), 200)
    assert len(answer["output_ids"]) == 200
    asyncio.run(memory.for_training())
    with pytest.raises(AssertionError, match="after a sync only"):
        asyncio.run(memory.for_rollout())
    asyncio.run(memory.for_sync())
    stage.sync(2)
    asyncio.run(memory.for_rollout())
    for url in stage.urls:
        answer = generate(url)
        assert answer["meta_info"]["weight_version"] == "2"
        assert logprob_error(stage.checkpoints[0], answer) < 1e-4


def test_requests_in_flight_continue_with_the_new_weights_and_say_from_which_token(
    stage: Stage,
) -> None:
    stage.sync(2)
    stage.ranks.load(stage.checkpoints[1])
    url = stage.urls[-1]  # that of two ranks, which takes longer for an answer
    answer = generate_across(
        url, lambda: asyncio.run(stage.sync_controller.sync(3)), MOST_TOKENS, until="3"
    )
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["2", "3"]
    assert spans[-1]["end"] == len(answer["output_ids"]) < MOST_TOKENS


def test_a_sync_of_a_tiny_model_takes_little_time(stage: Stage) -> None:
    stage.sync(3)
    seconds = sorted(asyncio.run(stage.sync_controller.sync(3)).seconds for _ in range(10))
    print(f"seconds per sync: median {seconds[5]:.3f}, least {seconds[0]:.3f}")
    assert seconds[0] < 2
    for engine in stage.sync_controller._engines.values():
        assert engine.store.num_keys < 20


def test_corrupted_bytes_keep_one_engine_out_of_rotation_until_it_is_synced_anew(
    stage: Stage,
) -> None:
    bad, good = stage.urls
    stage.sync(5)
    stage.ranks.inject(bad, Fault(rank=1, message=2, kind="corrupt"))
    asyncio.run(stage.sync_controller.connect([bad]))
    report = stage.sync(6)
    assert set(report.failed) == {bad}
    assert "has checksum" in report.failed[bad]
    assert f"rank 0 of engine {bad}" in report.failed[bad]
    assert "trainer rank 1" in report.failed[bad]
    assert (served_version(bad), served_version(good)) == ("5", "6")
    assert stage.sync_controller.in_rotation == (good,)
    asyncio.run(stage.sync_controller.connect([bad]))
    assert stage.sync_controller.in_rotation == (good,)
    assert not stage.sync(6, [bad]).failed
    assert set(stage.sync_controller.in_rotation) == {bad, good}
    assert logprob_error(stage.checkpoints[0], generate(bad)) < 1e-4


def test_an_engine_that_dies_leaves_the_others_in_rotation(stage: Stage) -> None:
    left, lost = stage.urls
    stage.engines[1].stop()
    report = stage.sync(7)
    assert set(report.failed) == {lost}
    assert lost in report.failed[lost]
    assert stage.sync_controller.in_rotation == (left,)
    assert not stage.sync(8).failed
    assert math.isclose(logprob_error(stage.checkpoints[0], generate(left)), 0, abs_tol=1e-4)


def test_a_trainer_rank_that_dies_is_named_and_the_engine_stays_out(stage: Stage) -> None:
    url = stage.urls[0]
    stage.ranks.processes[1].kill()
    with pytest.raises(SyncError, match="trainer rank 1"):
        asyncio.run(stage.sync_controller.sync(9))
    assert stage.sync_controller.in_rotation == ()
    assert served_version(url) == "8"
