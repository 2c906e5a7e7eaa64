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
    "exit": "SystemExit: the code tried to end the process with status None",
    "sys.exit": "SystemExit: the code tried to end the process with status 'three'",
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
    ("name", "workers"),
    [
        ("hang", 0),
        pytest.param("hang", 1, marks=pytest.mark.slow),
        pytest.param("hang_async", 0, marks=pytest.mark.slow),
        pytest.param("hang_many", 0, marks=pytest.mark.slow),
    ],
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


ARGUMENTS = "*, data_source, solution_str, ground_truth, extra_info"
ALL_ARGUMENTS = "*, data_sources, solution_strs, ground_truths, extra_infos"


@pytest.mark.parametrize(
    "method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("name", "workers"),
    [("all_of", 0), pytest.param("one", 0, marks=pytest.mark.slow), ("one", 1)],
)
def test_a_function_may_use_processes_of_its_own(
    tmp_path: Path, method: str, name: str, workers: int
) -> None:
    path = tmp_path / "with-pool.py"
    path.write_text(
        "import multiprocessing\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "class Verdict:\n"
        "    def __init__(self, right): self.right = right\n"
        "def compare(pair):\n"
        "    return Verdict(pair[0] == pair[1])\n"
        "def judge(pairs):\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        "    with ProcessPoolExecutor(1, mp_context=context) as pool:\n"
        "        return [float(verdict.right) for verdict in pool.map(compare, pairs)]\n"
        f"def all_of({ALL_ARGUMENTS}):\n"
        "    return judge(list(zip(solution_strs, ground_truths)))\n"
        f"def one({ARGUMENTS}):\n"
        "    return judge([(solution_str, ground_truth)])[0]\n"
    )
    assert answers(str(path), name, ["7", "8"], workers) == [{"score": 1.0}, {"score": 0.0}]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_may_have_dataclasses_with_postponed_annotations(
    tmp_path: Path, workers: int
) -> None:
    path = tmp_path / "verdicts.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Verdict:\n"
        "    right: bool\n"
        f"def reward({ARGUMENTS}):\n"
        "    return float(Verdict(solution_str == ground_truth).right)\n"
    )
    assert answers(str(path), "reward", ["7", "8"], workers) == [{"score": 1.0}, {"score": 0.0}]


AWAITABLES = f"""
import asyncio, functools
class Grader:
    async def __call__({ARGUMENTS.replace("*", "self, *")}):
        return await double({ARGUMENTS.replace("*, ", "").replace("data_source,", "0,")})
async def double(data_source, solution_str, ground_truth, extra_info, scale=2.0):
    await asyncio.sleep(0.2)
    return scale * float(solution_str == ground_truth)
def wrap(function):
    @functools.wraps(function)
    def inner(**kwargs):
        return function(**kwargs)
    return inner
def run(function):
    @functools.wraps(function)
    def inner(**kwargs):
        return asyncio.run(function(**kwargs))
    return inner
class Future:
    def __init__(self, *args): self.args = args
    def __await__(self): return double(*self.args).__await__()
grader = Grader()
partial = functools.partial(double, scale=2.0)
wrapped = wrap(double)
ran = run(double)
def plain({ARGUMENTS}):
    return double(data_source, solution_str, ground_truth, extra_info)
def future({ARGUMENTS}):
    return Future(data_source, solution_str, ground_truth, extra_info)
def rows(texts, truths):
    return [double("", text, truth, {{}}) for text, truth in zip(texts, truths)]
def many({ALL_ARGUMENTS}):
    return rows(solution_strs, ground_truths)
async def later({ALL_ARGUMENTS}):
    return rows(solution_strs, ground_truths)
class Many:
    async def __call__({ALL_ARGUMENTS.replace("*", "self, *")}):
        return await asyncio.gather(*rows(solution_strs, ground_truths))
many_object = Many()
"""
ONES = ("grader", "partial", "wrapped", "ran", "plain", "future")


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *((name, workers) for name in ONES for workers in (0, 1)),
        *((name, 0) for name in ("many", "later", "many_object")),
    ],
)
def test_awaitables_are_awaited_whoever_returns_them(
    tmp_path: Path, name: str, workers: int
) -> None:
    path = tmp_path / "later.py"
    path.write_text(AWAITABLES)
    assert answers(str(path), name, ["7", "8"], workers) == [{"score": 2.0}, {"score": 0.0}]


@pytest.mark.parametrize("name", ["grader", "partial", "wrapped", "plain", "future"])
def test_awaitables_of_a_sync_function_are_awaited_together(tmp_path: Path, name: str) -> None:
    path = tmp_path / "later.py"
    path.write_text(AWAITABLES)
    began_s = time.monotonic()
    assert answers(str(path), name, ["7"] * 20) == [{"score": 2.0}] * 20
    assert time.monotonic() - began_s < 2.0  # one after another: 4 s


@pytest.mark.parametrize(
    ("result", "error"),
    [
        ("{'score': 1.0, 'part': 2.0}", "TypeError: dict instead of a list with the reward"),
        ("'77'", "TypeError: str instead of a list with the reward"),
        ("7.0", "TypeError: float instead of a list with the reward"),
    ],
)
def test_a_function_of_all_samples_returns_a_list(tmp_path: Path, result: str, error: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"def reward({ALL_ARGUMENTS}):\n    return {result}\n")
    for answer in answers(str(path), "reward", ["a", "b"]):
        assert isinstance(answer, str) and answer.startswith(error)
