"""Processes of a run's holder outlive a controller, for the next one, and for a time."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from mcore_rl.cluster.group import ActorPlan, RankGroup, start_actor
from mcore_rl.cluster.outliving import name_run
from mcore_rl.cluster.placement import reserve
from mcore_rl.cluster.run_holder import (
    CALLS_AT_ONCE,
    RunHolder,
    SupersededError,
    open_holder,
)
from mcore_rl.cluster.session import RayLostError, open_ray_session
from mcore_rl.config import ClusterConfig
from mcore_rl.planning.bundles import plan_ranks

pytestmark = pytest.mark.e2e
EARLIER = """
import os, sys
from functools import partial
from pathlib import Path

import ray

from mcore_rl.cluster.group import RankGroup, start_actor
from mcore_rl.cluster.placement import reserve
from mcore_rl.cluster.run_holder import LivingRun, open_holder
from mcore_rl.cluster.state_keepers import KeptPlaces
from mcore_rl.planning.bundles import plan_ranks
from mcore_rl.planning.slots import RunSlots
from mcore_rl.process.server_keys import ServerKeys

name, folder, *dies = sys.argv[1:]
ray.init(address="ADDRESS", log_to_driver=False, logging_level="ERROR")
with open_holder(name, "recipe", 20.0, goes_on=True) as (held, _):
    plans = [plan_ranks(2, 0.5, gpus_per_node=0)]
    [slots] = held.run(partial(reserve, plans, 20.0))
    start = lambda plan: held.run(partial(start_actor, plan))
    group = RankGroup("trainer", slots, Path(folder), start=start)
    print(*group.pids(), flush=True)
    actors = {"trainer": group.actors[:1], "critic": [], "engines": []}
    slots = RunSlots(slots, [], [], {})
    kept = KeptPlaces({}, {})
    held.hold(LivingRun("recipe", slots, ServerKeys.make(), actors, kept, b"positions"))
    if dies:
        os.kill(os.getpid(), 9)
"""
"""An earlier controller: starts two ranks, prints their process ids, and holds the first one."""
Earlier = Callable[..., list[int]]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with open_ray_session(ClusterConfig(object_store_mib=80), num_cpus=4):
        yield


@pytest.fixture
def run_earlier(tmp_path: Path) -> Earlier:
    """Runs an earlier controller to its end; returns the process ids of its ranks."""

    def run(name: str, *dies: str) -> list[int]:
        script = EARLIER.replace("ADDRESS", ray.get_runtime_context().gcs_address)
        words = [sys.executable, "-c", script, name, str(tmp_path), *dies]
        done = subprocess.run(words, capture_output=True, text=True, timeout=240)
        assert done.returncode == (-9 if dies else 0), done.stderr
        return [int(pid) for pid in done.stdout.splitlines()[0].split()]

    return run


def wait_until_gone(*pids: int) -> None:
    until_s = time.monotonic() + 20
    while living := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < until_s, f"processes {living} go on"
        time.sleep(0.05)


def test_the_next_controller_gets_what_the_one_before_held_and_ends_the_rest(
    run_earlier: Earlier, tmp_path: Path
) -> None:
    first, second = run_earlier("goes on", "dies")
    with open_holder("goes on", "recipe", 20.0, goes_on=True) as (held, living):
        assert living is not None and living.positions == b"positions"
        held.keep_only(living.list_actors())
        wait_until_gone(second)
        slots = living.slots.trainer[:1]
        actors = dict(enumerate(living.actors["trainer"]))
        group = RankGroup("trainer", slots, tmp_path, living=actors)
        assert group.pids() == [first]
    wait_until_gone(first)


@pytest.mark.parametrize(("recipe", "goes_on"), [("another", True), ("recipe", False)])
def test_what_is_not_gone_on_with_is_ended(
    run_earlier: Earlier, recipe: str, goes_on: bool
) -> None:
    name = f"{recipe} {goes_on}"
    pids = run_earlier(name, "dies")
    with open_holder(name, recipe, 20.0, goes_on=goes_on) as (_, living):
        assert living is None
        wait_until_gone(*pids)


def test_nothing_is_left_by_a_controller_that_ends(run_earlier: Earlier) -> None:
    wait_until_gone(*run_earlier("ends"))
    with open_holder("ends", "recipe", 20.0, goes_on=True) as (_, living):
        assert living is None


def test_what_no_controller_takes_over_ends_in_time(tmp_path: Path) -> None:
    make: Any = ray.remote(RunHolder)
    holder = make.options(num_cpus=0, max_concurrency=CALLS_AT_ONCE).remote(1.0)
    job = ray.get_runtime_context().get_job_id()
    ray.get(holder.lead.remote(job))
    [slots] = reserve([plan_ranks(1, 0.5, gpus_per_node=0)], 20.0)

    def start(plan: ActorPlan) -> Any:
        made, error = ray.get(holder.run.remote(job, partial(start_actor, plan)))
        assert error is None
        return made

    [pid] = RankGroup("trainer", slots, tmp_path, start=start).pids()
    time.sleep(3)
    assert psutil.pid_exists(pid), "its controller is there"
    ray.get(holder.lead.remote("a job that is over"))
    wait_until_gone(pid)


def test_a_controller_that_was_superseded_ends_nothing(tmp_path: Path) -> None:
    with open_holder("led by another", "recipe", 20.0, goes_on=True) as (held, _):
        [slots] = held.run(partial(reserve, [plan_ranks(1, 0.5, gpus_per_node=0)], 20.0))
        group = RankGroup(
            "trainer", slots, tmp_path, start=lambda plan: held.run(partial(start_actor, plan))
        )
        [pid] = group.pids()
        holder = ray.get_actor("led by another", namespace="mcore_rl")
        ray.get(holder.lead.remote("another"))
        with pytest.raises(SupersededError, match="job another has taken over"):
            held.keep_only([])
    assert psutil.pid_exists(pid)
    ray.kill(holder)
    wait_until_gone(pid)


def test_the_loss_of_the_holder_is_that_of_the_ranks() -> None:
    with open_holder("is lost", "recipe", 20.0, goes_on=True) as (held, _):
        held.kill()
        until_s = time.monotonic() + 20
        with pytest.raises(RayLostError, match="owns the ranks and engines died"):
            while time.monotonic() < until_s:  # Ray kills it a moment later
                held.keep_only([])


def test_the_holder_returns_errors_of_the_recipe() -> None:
    plan = [plan_ranks(64, 1.0, gpus_per_node=0)]
    opened = open_holder("too large", "recipe", 20.0, goes_on=True)
    with opened as (held, _), pytest.raises(ValueError, match="the run needs 64 CPU"):
        held.run(partial(reserve, plan, 0.5))


def test_a_folder_of_the_same_path_on_another_machine_has_another_name(tmp_path: Path) -> None:
    here = tmp_path / "run"
    name = name_run(here)
    assert name_run(here) == name and name.startswith(f"{here} ")
    shutil.rmtree(here)
    assert name_run(here) != name
