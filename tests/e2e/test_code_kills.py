"""kill -9 of the sandbox's processes during a run costs neither the run nor a score."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.runs import Run, tiny_settings
from tests.support.sandbox_servers import free_port, serving, write_key

pytestmark = pytest.mark.e2e

KEY = "a-key-of-this-test"
REWARD = """
from mcore_rl.rewards.code.execution import CaseSettings
from mcore_rl.rewards.code.score import score_responses

PROGRAM = "```python\\nimport time\\nn = int(input())\\ntime.sleep(0.2)\\nprint(2 * n)\\n```"
TRUTH = {"inputs": ["1", "2", "3"], "outputs": ["2", "4", "6"]}

def reward(*, data_sources, solution_strs, ground_truths, extra_infos, sandbox_url=""):
    num = len(solution_strs)
    settings = CaseSettings(wall_s=60.0, total_s=180.0, sandbox_url=sandbox_url)
    return score_responses([PROGRAM] * num, [TRUTH] * num, settings)
"""
"""Each sample is scored by a program that is right, so a reward below 1 was taken by a kill."""


def oldest(found: list[psutil.Process]) -> list[psutil.Process]:
    return sorted(found, key=psutil.Process.create_time)[:1]


def newest(found: list[psutil.Process]) -> list[psutil.Process]:
    return sorted(found, key=psutil.Process.create_time)[-1:]


def begin(arithmetic: Path, tmp_path: Path, num_steps: int, *settings: str) -> Run:
    path = tmp_path / "right.py"
    path.write_text(REWARD)
    words = [
        *tiny_settings(arithmetic),
        "model.init=random",
        "eval.data=[]",
        f"run.steps={num_steps}",
    ]
    words += [f"reward.path={path}", "run.call_timeout_s=300", *settings]
    return Run(["train", *words], tmp_path / "run")


def assert_all_scored(run: Run, num_steps: int) -> None:
    assert run.finish(500) == 0, run.tail()
    steps = [line for line in run.metrics() if "reward/mean" in line]
    assert len(steps) == num_steps, run.tail()
    assert [step["reward/mean"] for step in steps] == [1.0] * num_steps, run.tail()
    assert [step["reward/errors"] for step in steps] == [0.0] * num_steps, run.tail()
    run.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kills_of_wardens_boxes_and_programs(arithmetic: Path, tmp_path: Path) -> None:
    """A title has the warden's module: itself, process 1 of a box, its driver, the program."""
    num_steps = 10  # a busy machine takes some of them between two kills
    run = begin(arithmetic, tmp_path, num_steps)
    killed: list[int] = []
    choices: list[Callable[[list[psutil.Process]], list[psutil.Process]]] = [oldest, newest, list]
    try:
        for number, choose in enumerate(choices):
            run.wait_until(lambda: run.find("mcore_rl.services.sandbox.warden"), "a sandbox", 300)
            for process in choose(run.find("mcore_rl.services.sandbox.warden")):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    killed.append(process.pid)
            run.wait_until(lambda n=number: len(run.metrics()) > n, "a step after a kill", 300)
        assert_all_scored(run, num_steps)
        assert len(killed) >= 3
    finally:
        run.kill_all()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kill_of_a_server_that_starts_again(arithmetic: Path, tmp_path: Path) -> None:
    port = free_port()
    key_file = write_key(tmp_path, KEY)
    url = f"http://any:{KEY}@127.0.0.1:{port}"
    run = begin(arithmetic, tmp_path, 4, f"reward.kwargs.sandbox_url={url}")
    try:
        with serving(port, key_file) as server:
            program = psutil.Process(server.pid)
            run.wait_until(lambda: len(program.children(recursive=True)) > 1, "a program", 300)
            server.kill()
        with serving(port, key_file):
            assert_all_scored(run, 4)
    finally:
        run.kill_all()
