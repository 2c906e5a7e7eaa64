"""A whole run starts a sandbox and a search, loses them, and leaves nothing behind however it ends.

Its environment searches in each step; its reward runs a program in the sandbox.
"""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mcore_rl.services.search.build import build_index
from mcore_rl.services.search.layout import IndexOptions
from mcore_rl.tasks.calculator import prepare_calculator
from tests.services.search.corpora import write_corpus
from tests.support.runs import Run
from tests.support.submitted import SubmittedRun

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]
Begin = Callable[..., Run]
Submit = Callable[..., SubmittedRun]
JOB = (
    "launch=slurm",
    "launch.gpus_per_node=0",
    "launch.cpus_per_node=2",
    "launch.memory_gib_per_node=3",
    "launch.start_timeout_s=300",
)
WAIT_S = 600.0
SANDBOX, SEARCH = ("mcore_rl.cli sandbox serve",), ("mcore_rl.cli search serve",)
ENVIRONMENT = '''
import base64, json, time, urllib.error, urllib.request
from mcore_rl.agents.environments.environment import Start, Step
from mcore_rl.agents.environments.search_env import Searcher, SearchOptions
from mcore_rl.process.server_keys import read_sandbox_url, split_key

def run(code):
    url, key = split_key(read_sandbox_url())
    token = base64.b64encode(f"run:{key}".encode()).decode()
    body = json.dumps({"code": code, "language": "python"}).encode()
    request = urllib.request.Request(url, body, {"Authorization": f"Basic {token}"})
    until_s = time.monotonic() + 200
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                done = json.load(answer)
                if done["status"] == "Success":
                    return done["run_result"]["stdout"]
        except (OSError, urllib.error.URLError):
            pass
        assert time.monotonic() < until_s, "the sandbox stays away"
        time.sleep(0.2)

class Looks:
    """Two answers; after each it looks something up, and has a program add numbers."""

    def __init__(self):
        self.searcher = Searcher(SearchOptions(topk=1, deadline_s=200))

    def reset(self, task):
        self.left = 2
        return Start(list(task["messages"]))

    def step(self, message):
        self.left -= 1
        found = self.searcher.show("town of bova")
        added = run("print(sum(range(9)))")
        right = float("dorm" in found and added == "36\\n")
        question = {"role": "user", "content": "what is 1 + 1 ?"}
        return Step([question], reward=right, done=self.left == 0, metrics={"right": right})

    def close(self):
        pass
'''
REWARD = """
import sys
sys.path.insert(0, FOLDER)
from looks import run

def reward(*, data_source, solution_str, ground_truth, extra_info):
    return float(run("print(40 + 2)") == "42\\n")
"""


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    """Write prompts, an index, and code that asks both servers; return their folder."""
    prepare_calculator(tmp_path / "data")
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["bova\nthe town of bova is dorm"])
    build_index(corpus, tmp_path / "index", IndexOptions(), None)
    (tmp_path / "looks.py").write_text(ENVIRONMENT)
    (tmp_path / "scored.py").write_text(REWARD.replace("FOLDER", repr(str(tmp_path))))
    return tmp_path


@pytest.fixture
def begin(scene: Path) -> Iterator[Begin]:
    """begin(*settings) -> Run of `mcore-rl train` with both servers."""
    runs: list[Run] = []

    def begin_run(*settings: str) -> Run:
        runs.append(Run(("train", *base(scene), *settings), scene / "run"))
        return runs[-1]

    yield begin_run
    for run in runs:
        run.kill_all()


def base(folder: Path) -> list[str]:
    return [
        "recipe=tiny_agent_calculator",
        f"model.path={folder / 'data' / 'model'}",
        "model.init=random",
        f"data.train=[{folder / 'data' / 'train.parquet'}]",
        "eval.data=[]",
        "eval.every_steps=0",
        "checkpoint.export_hf=false",
        "run.call_timeout_s=400",
        "run.startup_timeout_s=600",
        "parallel.ep=1",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "rollout.max_response_len=40",
        "reward.noise=1.0",
        "agents.deadline_s=300",
        "agents.workers=1",
        "agents.options.functions=null",
        "agents.options.reward=null",
        f"agents.environment={folder / 'looks.py'}:Looks",
        f"reward.path={folder / 'scored.py'}",
        "reward.parts=[environment,score]",
        "reward.weights=[1.0,1.0]",
        "reward.workers=1",
        "reward.timeout_s=300",
        "sandbox.workers=1",
        f"search.index={folder / 'index'}",
    ]


def test_servers_that_are_killed_cost_no_run(begin: Begin) -> None:
    run = begin("run.steps=6")
    killed: list[int] = []
    for step in (1, 3):
        run.wait_for(f"step {step}: train", WAIT_S)
        for words in (SANDBOX, SEARCH):
            server = run.find_one(*words)
            server.send_signal(signal.SIGKILL)
            killed.append(server.pid)
    assert run.finish(WAIT_S) == 0, run.tail()
    run.assert_nothing_left()
    assert len(set(killed)) == 4
    rows = [row for row in run.metrics() if "loss/total" in row]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(row["episodes/right"] == 1 for row in rows), rows
    assert all(row.get("episodes/end/env_error", 0) == 0 for row in rows), rows
    assert all(row.get("reward/errors", 0) == 0 for row in rows), rows
    collector = (run.run_dir / "logs" / "collector_rank0.log").read_text()
    assert collector.count("it is started again") == 4, collector
    written = [path for path in run.run_dir.rglob("*") if path.is_file()]
    assert len([path for path in written if path.name in ("sandbox_0.log", "search_0.log")]) == 2
    text = "".join(path.read_text(errors="replace") for path in written if path.suffix == ".log")
    assert "//run:" not in text, "an address with its key was written"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_servers_end_with_a_run_that_is_ended(begin: Begin, number: signal.Signals) -> None:
    run = begin("run.steps=1000")
    run.wait_for("step 2: train", WAIT_S)
    for words in (SANDBOX, SEARCH):
        assert run.find_one(*words).is_running()
    run.process.send_signal(number)
    assert run.finish(WAIT_S) in (130, -9)
    run.assert_nothing_left()


def test_a_collector_that_is_killed_brings_its_servers_back(begin: Begin) -> None:
    run = begin("run.steps=6")
    run.wait_for("step 2: train", WAIT_S)
    servers = [run.find_one(*words) for words in (SANDBOX, SEARCH)]
    run.find_one("ray::collector_rank0").send_signal(signal.SIGKILL)
    assert run.finish(WAIT_S) == 0, run.tail()
    run.assert_nothing_left()
    assert not any(server.is_running() for server in servers)
    rows = [json.dumps(row) for row in run.metrics() if "loss/total" in row]
    assert len(rows) == 6, rows


@pytest.fixture
def submit(scene: Path, slurm: None) -> Iterator[Submit]:
    """submit(*settings) -> the run as a job of SLURM on one node."""
    runs: list[SubmittedRun] = []

    def submit_run(*settings: str) -> SubmittedRun:
        runs.append(SubmittedRun([*base(scene), *JOB, *settings], scene / "run"))
        return runs[-1]

    yield submit_run
    for run in runs:
        run.kill()


def servers_of(run: SubmittedRun) -> list[psutil.Process]:
    words = (*SANDBOX, *SEARCH)
    return [p for p in run.processes() if any(each in " ".join(p.cmdline()) for each in words)]


def test_a_job_of_slurm_has_servers_of_its_own(submit: Submit) -> None:
    run = submit("run.steps=3")
    run.wait_for("step 1: train", WAIT_S)
    servers = servers_of(run)
    assert len(servers) == 2, [p.cmdline() for p in servers]
    for server in servers:
        assert "slurmstepd" in [parent.name() for parent in server.parents()]
    run.wait_ended(timeout_s=WAIT_S)
    assert not any(server.is_running() for server in servers)
    run.wait_until_nothing_is_left()
    rows = [row for row in run.metrics() if "loss/total" in row]
    assert [row["episodes/right"] for row in rows] == [1, 1, 1]
    assert all(row.get("reward/errors", 0) == 0 for row in rows), rows


def test_servers_end_with_a_job_of_slurm_that_is_canceled(submit: Submit) -> None:
    run = submit("run.steps=1000")
    run.wait_for("step 1: train", WAIT_S)
    servers = servers_of(run)
    assert len(servers) == 2, [p.cmdline() for p in servers]
    run.mcore_rl("cancel", str(run.run_dir))
    run.wait_until(lambda: " ended: CANCELLED" in run.status(), "end")
    run.wait_until_nothing_is_left()
    assert not any(server.is_running() for server in servers)
