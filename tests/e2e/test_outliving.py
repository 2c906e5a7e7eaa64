"""Ranks and engines outlive a controller that is killed, where Ray does, and the next goes on."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from mcore_rl.cluster.node_agent.ray_node import RayNode, RayProcesses
from mcore_rl.cluster.process_tags import make_ray_temp_dir
from tests.e2e.test_recovery import SETTINGS, numbers
from tests.support.books import assert_books_balance, assert_same_prompts
from tests.support.debuggers import wait_for_match
from tests.support.ray_token import set_ray_token
from tests.support.runs import Run
from tests.support.victims import PHASES

pytestmark = pytest.mark.e2e
Start = Callable[..., Run]
RANKS = ("ray::trainer_rank", "ray::critic_rank", "ray::engine_rank")
OUTLIVING = (*RANKS, "mcore_rl.rollout.server")
"""Words in the titles of ranks, engines and their servers."""
MORE = ("algorithm.advantage=gae", "checkpoint.every_steps=0", "eval.data=[]")


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayProcesses]:
    """A Ray of this test's own."""
    set_ray_token(tmp_path, monkeypatch)
    facts = RayNode("head", "1", "127.0.0.2", 4, 0, object_store_mib=80, resources={})
    with make_ray_temp_dir() as temp_dir:
        started = RayProcesses(facts, None, temp_dir, tmp_path / "ray.log")
        try:
            wait_for_match("Ray runtime started", started.log_path.read_text, 60)
            yield started
        finally:
            started.stop()


def join(ray: RayProcesses) -> tuple[str, ...]:
    return f"cluster.address={ray.head_address}", "cluster.cpus_per_rank=1"


def find_outliving(ray: RayProcesses) -> dict[psutil.Process, str]:
    """Return ranks, engines and their servers with their titles."""
    found = {}
    for process in psutil.Process(ray.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found[process] = " ".join(process.cmdline())
    return {p: title for p, title in found.items() if any(word in title for word in OUTLIVING)}


def kill_controller(run: Run) -> None:
    psutil.Process(run.process.pid).children()[0].kill()


def kill_command(run: Run) -> None:
    """Kill the command, with which its controller ends."""
    run.process.kill()
    run.process.wait(10)


def wait_for_next(run: Run, done: int, num_steps: int) -> None:
    goes_on = f"goes on after step {done} of {num_steps}, which is in memory"
    run.wait_until(lambda: goes_on in run.tail(10**6), goes_on)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_and_engines_go_on_with_the_next_controller(
    start: Start, ray: RayProcesses, tmp_path: Path
) -> None:
    """No checkpoint is written before the last step, so none is gone on from.

    What died together with the controller is started again, and goes on from memory, too.
    """
    settings = (*SETTINGS, *MORE, "run.steps=8")
    whole = start("train", *settings, run_dir=tmp_path / "whole")
    assert whole.finish() == 0, whole.tail()
    run = start("train", *settings, *join(ray), run_dir=tmp_path / "run")
    for phase, step in (("train", 2), ("rollout", 3), ("sync", 4), ("logprobs", 5)):
        run.wait_for(PHASES[phase].format(step=step), poll_s=0.002)
        living = find_outliving(ray)
        assert len(living) >= 5, living
        kill_controller(run)
        wait_for_next(run, step - 1, 8)
        run.wait_for(PHASES["train"].format(step=step), poll_s=0.002)
        assert find_outliving(ray).keys() == living.keys()
    for words, step in (("ray::critic_rank0", 6), ("mcore_rl.rollout.server", 7)):
        run.wait_for(PHASES["train"].format(step=step), poll_s=0.002)
        living = find_outliving(ray)
        victim = next(process for process, title in living.items() if words in title)
        kill_controller(run)
        victim.kill()
        wait_for_next(run, step - 1, 8)
        run.wait_for(PHASES["train"].format(step=step), poll_s=0.002)
        ranks = {p for p, title in living.items() if "ray::trainer" in title}
        assert ranks and ranks <= find_outliving(ray).keys()
    assert run.finish(300) == 0, run.tail()
    wait_until_ended(ray)
    assert numbers(run) == numbers(whole)
    assert_same_prompts(whole.run_dir, run.run_dir)
    assert_books_balance(run.run_dir, 8)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_command_takes_over_and_another_recipe_does_not(
    start: Start, ray: RayProcesses, tmp_path: Path
) -> None:
    settings = (*SETTINGS, *MORE, *join(ray))
    first = start("train", *settings, "run.steps=6", run_dir=tmp_path / "run")
    first.wait_for("step 3: train")
    living = find_outliving(ray)
    kill_command(first)
    second = start("train", *settings, "run.steps=6", run_dir=tmp_path / "run")
    wait_for_next(second, 2, 6)
    second.wait_for("step 4: train")
    assert len(living) >= 5 and find_outliving(ray).keys() == living.keys()
    kill_command(second)
    third = start("train", *settings, "run.steps=2", run_dir=tmp_path / "run")
    third.wait_for("step 1: train")
    assert not find_outliving(ray).keys() & living.keys()
    assert third.finish(300) == 0, third.tail()
    assert "in memory" not in third.tail(10**6)
    wait_until_ended(ray)
    assert_books_balance(third.run_dir, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fine_tuning_goes_on_too(start: Start, ray: RayProcesses, tmp_path: Path) -> None:
    settings = ("sft.steps=8", "checkpoint.every_steps=0", "model.init=random")
    whole = start("sft", *settings, run_dir=tmp_path / "whole")
    assert whole.finish() == 0, whole.tail()
    run = start("sft", *settings, *join(ray), run_dir=tmp_path / "run")
    for step in (3, 6):
        run.wait_for(PHASES["train"].format(step=step), poll_s=0.002)
        living = find_outliving(ray)
        kill_controller(run)
        run.wait_until(lambda: "goes on after step" in run.tail(), "a next controller")
    assert run.finish() == 0, run.tail()
    assert len(living) == 2 and run.tail().count("which is in memory") == 2
    wait_until_ended(ray)
    assert numbers(run) == numbers(whole)


def wait_until_ended(ray: RayProcesses) -> None:
    until_s = time.monotonic() + 20
    while living := find_outliving(ray):
        assert time.monotonic() < until_s, living
        time.sleep(0.2)
