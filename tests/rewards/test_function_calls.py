"""Whatever a function raises costs its sample alone, in every mode; a Ctrl-C ends the run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_rl.config import RewardConfig
from mcore_rl.rewards.function_calls import FunctionCalls
from mcore_rl.rewards.user_function import Answer, Fields, load_function

FUNCTIONS = """
import asyncio, sys, time
class Stop(BaseException):
    pass
class OwnInterrupt(KeyboardInterrupt):
    pass
class Mute(Exception):
    def __str__(self):
        raise SystemExit(4)
def misbehave(text):
    if text == "exit": exit()
    if text == "sys.exit": sys.exit("three")
    if text == "generator": raise GeneratorExit("closed")
    if text == "custom": raise Stop("enough")
    if text == "interrupt": raise OwnInterrupt("own")
    if text == "cancel": raise asyncio.CancelledError("own")
    if text == "mute": raise Mute
    return {"score": 1.0, 5: 2.0, "\\ud800": 3.0}
def one(*, data_source, solution_str, ground_truth, extra_info):
    return misbehave(solution_str)
async def one_async(*, data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return misbehave(solution_str)
def many(*, data_sources, solution_strs, ground_truths, extra_infos):
    return [misbehave(text) for text in solution_strs]
async def many_async(*, data_sources, solution_strs, ground_truths, extra_infos):
    return [misbehave(text) for text in solution_strs]
def lazy(*, data_sources, solution_strs, ground_truths, extra_infos):
    class Lazy(list):
        def __iter__(self):
            return (misbehave(text) for text in solution_strs)
    return Lazy(solution_strs)
def hang(*, data_source, solution_str, ground_truth, extra_info):
    print("hangs", flush=True)
    time.sleep(60)
async def hang_async(*, data_source, solution_str, ground_truth, extra_info):
    print("hangs", flush=True)
    await asyncio.sleep(60)
def hang_many(*, data_sources, solution_strs, ground_truths, extra_infos):
    print("hangs", flush=True)
    time.sleep(60)
"""
GOOD = {"score": 1.0, "5": 2.0, "\\ud800": 3.0}
ERRORS = {
    "exit": "SystemExit: the function tried to end the process with status None",
    "sys.exit": "SystemExit: the function tried to end the process with status 'three'",
    "generator": "GeneratorExit: closed",
    "custom": "Stop: enough",
    "interrupt": "OwnInterrupt: own",
    "cancel": "CancelledError: own",
    "mute": "Mute, which has no text: its __str__ raised SystemExit",
}


@pytest.fixture
def reward_file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return str(path)


def answers(path: str, name: str, texts: list[str], workers: int = 0) -> list[Answer]:
    rows: list[Fields] = [("unit", text, "7", {}) for text in texts]
    config = RewardConfig(path=path, name=name, workers=workers)
    calls = FunctionCalls(config, load_function(path, name))
    try:
        return calls(rows)
    finally:
        calls.close()


@pytest.mark.parametrize(
    ("name", "workers"), [("one", 0), ("one_async", 0), ("one", 1), ("one_async", 1)]
)
def test_what_a_function_raises_costs_its_sample(reward_file: str, name: str, workers: int) -> None:
    texts = ["good", *ERRORS, "good"]
    assert answers(reward_file, name, texts, workers) == [GOOD, *ERRORS.values(), GOOD]


@pytest.mark.parametrize("name", ["many", "many_async", "lazy"])
@pytest.mark.parametrize("text", ERRORS)
def test_a_function_of_all_samples_costs_those_of_its_call(
    reward_file: str, name: str, text: str
) -> None:
    assert answers(reward_file, name, ["good", text]) == [ERRORS[text]] * 2
    assert answers(reward_file, name, ["good", "good"]) == [GOOD] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_recipe_gives_further_arguments(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "mine.py"
    arguments = "*, data_source, solution_str, ground_truth, extra_info, scale"
    path.write_text(f"def f({arguments}):\n    return scale * len(solution_str)\n")
    config = RewardConfig(path=str(path), name="f", kwargs={"scale": 2.0}, workers=workers)
    calls = FunctionCalls(config, load_function(str(path), "f", config.kwargs))
    try:
        assert calls([("", "abc", "", {})]) == [{"score": 6.0}]
    finally:
        calls.close()


def test_an_interrupt_that_a_worker_raises_is_the_function_s_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    arguments = "*, data_source, solution_str, ground_truth, extra_info"
    path.write_text(f"def f({arguments}):\n    raise KeyboardInterrupt('own')\n")
    assert answers(str(path), "f", ["a"], workers=1) == ["KeyboardInterrupt: own"]


CONTROLLER = """
import sys
from mcore_rl.config import RewardConfig
from mcore_rl.rewards.scorer import Scorer
from tests.support.samples import make_sample

path, name, workers = sys.argv[1:]
if __name__ == "__main__":
    with Scorer(RewardConfig(path=path, name=name, workers=int(workers)), 100) as scorer:
        try:
            scorer([make_sample(0, "a")])
        except KeyboardInterrupt:
            sys.exit(130)
"""


@pytest.mark.parametrize(
    ("name", "workers"), [("hang", 0), ("hang_async", 0), ("hang_many", 0), ("hang", 1)]
)
def test_a_ctrl_c_ends_the_run(reward_file: str, tmp_path: Path, name: str, workers: int) -> None:
    script = tmp_path / "controller.py"
    script.write_text(CONTROLLER)
    process = subprocess.Popen(
        [sys.executable, str(script), reward_file, name, str(workers)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"hangs\n"
        began_s = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to every process of the run
        assert process.wait(20) == 130
        assert time.monotonic() - began_s < 15
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_function_of_all_samples_may_give_an_error_for_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def reward(*, data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [1.0, RuntimeError('no sandbox')]\n"
    )
    calls = FunctionCalls(RewardConfig(path=str(path)), load_function(str(path), "reward"))
    answers = calls([("", "a", "7", {}), ("", "b", "7", {})])
    assert answers == [{"score": 1.0}, "RuntimeError: no sandbox"]
