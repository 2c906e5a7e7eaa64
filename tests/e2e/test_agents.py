"""Whole runs in which the policy talks with an environment, through real tools and engines."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcore_rl.tasks.calculator import prepare_calculator
from mcore_rl.tools.view.sample_index import Filter, SampleIndex
from tests.support.pages import look_through
from tests.support.runs import Run

pytestmark = pytest.mark.e2e
Start = Callable[..., Run]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Start]:
    """begin(*settings) -> Run of `mcore-rl train`; what it leaves is killed at the end."""
    runs: list[Run] = []

    def begin_run(*settings: str) -> Run:
        runs.append(Run(("train", *settings), tmp_path / f"run{len(runs)}"))
        return runs[-1]

    yield begin_run
    for run in runs:
        run.kill_all()


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calculator")
    prepare_calculator(folder)
    return folder


def settings(folder: Path) -> list[str]:
    """Return the calculator's recipe in its smallest size, with a model that knows nothing."""
    return [
        "recipe=tiny_agent_calculator",
        f"model.path={folder / 'model'}",
        "model.init=random",
        f"data.train=[{folder / 'train.parquet'}]",
        f"eval.data=[{folder / 'heldout.parquet'}]",
        "eval.max_prompts=4",
        "eval.every_steps=0",
        "checkpoint.export_hf=false",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "reward.noise=1.0",
    ]


THREE_QUESTIONS = """
from mcore_rl.agents.environments.environment import Start, Step

class ThreeQuestions:
    def reset(self, task):
        self.left = 3
        return Start(list(task["messages"]))

    def step(self, message):
        self.left -= 1
        question = {"role": "user", "content": "what is 1 + 1 ?"}
        return Step([question], reward=float(self.left == 1), done=self.left == 0)

    def close(self):
        pass
"""


FACTORS = ("train.lora.rank=4", "train.router_aux_loss_coef=0")


@pytest.mark.parametrize(
    ("mode", "trained"),
    [
        pytest.param("sync", (), marks=pytest.mark.slow),
        ("async", ()),
        pytest.param("async", FACTORS, marks=pytest.mark.slow),
    ],
    ids=["sync", "async", "factors"],
)
def test_tokens_of_all_turns_train_as_they_were_sampled(
    begin: Start, calculator: Path, tmp_path: Path, mode: str, trained: tuple[str, ...]
) -> None:
    """The trainer gives each sampled token the log-prob that the engine gave it in its turn.

    In sync mode the beginnings that episodes of a prompt have in common are computed once.
    """
    (tmp_path / "three.py").write_text(THREE_QUESTIONS)
    environment = f"agents.environment={tmp_path / 'three.py'}:ThreeQuestions"
    unread = ["agents.options.functions=null", "agents.options.reward=null"]
    options = [environment, *unread, "rollout.max_response_len=80", "run.steps=3"]
    options.append("algorithm.correction.weight=none")
    options.append(f"train.share_prefixes={'true' if mode == 'sync' else 'false'}")
    run = begin(*settings(calculator), *options, *trained, f"rollout.mode={mode}")
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    steps = [line for line in run.metrics() if "loss/total" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["episodes/turns"] == 3.0 and line["episodes/end/done"] == 1.0
        assert line["episodes/rows"] == 1.0 and line["loss/grad_norm"] > 0
        assert line["reward/part/environment"] == pytest.approx(1.0, abs=1.0)
        assert line["logprob_diff/arithmetic"] < 1e-5, line
    assert steps[0]["logprob_diff/router_flip_share"] < 0.01
    rows = (run.run_dir / "samples.jsonl").read_text().splitlines()
    turns = json.loads(rows[-1])["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0, 1]
    assert [turn["reward"] for turn in turns] == [0.0, 1.0, 0.0]
    assert turns[1]["messages"] == [{"role": "user", "content": "what is 1 + 1 ?"}]
    check_tokens(run.run_dir)
    look_through(run.run_dir, tmp_path / "browser")


def check_tokens(run_dir: Path) -> None:
    """Check the tokens of the first episodes of each step, as `mcore-rl view` reads them."""
    index = SampleIndex(run_dir)
    while not index.refresh():
        pass
    numbers = index.find(Filter(split="train", with_tokens=True)).rows.tolist()
    assert len(numbers) == 3 * 4
    for row in map(index.read, numbers):
        [tokens] = row["token_rows"]
        assert [turn for _, _, turn in tokens["trained"]] == [0, 1, 2]
        lens = [stop - start for start, stop, _ in tokens["trained"]]
        assert lens == [turn["tokens"] for turn in row["turns"]]
        assert len(tokens["logprobs"]) == sum(lens) == row["response_len"]
        assert all(logprob <= 0 for logprob in tokens["logprobs"])
        assert {version for _, _, version in tokens["versions"]} == set(row["weights"])
        assert "<|user|>" in tokens["texts"] and isinstance(row["advantage"], float)


@pytest.mark.slow
def test_tools_are_called_and_a_worker_that_dies_costs_its_episodes_only(
    begin: Start, calculator: Path
) -> None:
    run = begin(*settings(calculator), "run.steps=3")
    run.find_one("mcore_rl.agents.environments.worker").kill()
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    steps = [line for line in run.metrics() if "loss/total" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    ends = {name for line in steps for name in line if name.startswith("episodes/end/")}
    assert ends <= {
        f"episodes/end/{end}" for end in ("done", "max_turns", "max_tokens", "parse_error")
    }


@pytest.mark.slow
def test_a_model_is_tried_in_an_environment(calculator: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mcore_rl.cli", "agent", "run", "--episodes", "2"]
    done = subprocess.run(
        [*command, *settings(calculator), f"run.dir={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("=== prompt ") == 2 and done.stdout.count("[user] what is ") == 2
    assert done.stdout.count("[assistant] ") >= 2 and done.stdout.count("sampled tokens") == 2
