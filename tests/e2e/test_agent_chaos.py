"""Whatever dies, each episode ends with one reason and in time, and none is trained twice."""

import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from mcore_rl.agents.messages import EndReason
from mcore_rl.logs.rows import read_rows
from mcore_rl.tasks.calculator import prepare_calculator
from tests.support.chaos import CLIENT, ENVIRONMENT, PROGRAM, Chaos, lifetimes_s
from tests.support.episode_rows import reasons_by_group
from tests.support.runs import Run

pytestmark = pytest.mark.e2e
Start = Callable[..., Run]

DEADLINE_S = 8.0
NOTICED_S = 15.0
"""How much later an episode may give its last sign of life on a busy machine."""
MODES = {
    "sync": ["rollout.mode=sync"],
    "async": [
        "rollout.mode=async",
        "algorithm.correction.weight=token",
        "rollout.stale=drop",
        "rollout.max_staleness=1",
    ],
}


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Start]:
    """begin(*settings) -> Run of `mcore-rl train` in one folder, where later runs resume."""
    prepare_calculator(tmp_path / "data")
    (tmp_path / "notes").mkdir()
    (tmp_path / "chaos_environment.py").write_text(ENVIRONMENT)
    runs: list[Run] = []

    def begin_run(*settings: str) -> Run:
        runs.append(Run(("train", *base(tmp_path), *settings), tmp_path / "run"))
        return runs[-1]

    yield begin_run
    for run in runs:
        run.kill_all()


def base(folder: Path) -> list[str]:
    """Return settings of small steps that save each checkpoint, of a model that knows nothing."""
    return [
        "recipe=tiny_agent_calculator",
        f"model.path={folder / 'data' / 'model'}",
        "model.init=random",
        f"data.train=[{folder / 'data' / 'train.parquet'}]",
        "eval.data=[]",
        "eval.every_steps=0",
        "checkpoint.export_hf=false",
        "checkpoint.every_steps=1",
        "run.steps=1000",
        "run.call_timeout_s=240",
        "run.startup_timeout_s=600",
        "parallel.ep=1",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "rollout.max_response_len=80",
        "rollout.restarts=20",
        "reward.noise=1.0",
        "reward.max_failed_share=1",
        f"agents.deadline_s={DEADLINE_S}",
        "agents.workers=2",
        "agents.episodes_per_worker=16",
        "agents.options.functions=null",
        "agents.options.reward=null",
    ]


def tools(folder: Path) -> list[str]:
    path = folder / "chaos_environment.py"
    return [f"agents.environment={path}:ToolTalk", f"agents.options.notes={folder / 'notes'}"]


def programs(folder: Path) -> list[str]:
    (folder / f"{PROGRAM}.py").write_text(CLIENT)
    words = [sys.executable, str(folder / f"{PROGRAM}.py"), PROGRAM, str(folder / "notes")]
    return ["agents.environment=command", f"agents.options.command=[{','.join(words)}]"]


KINDS = {"tools": tools, "programs": programs}


def check(run_dir: Path, notes: Path, num_resumes: int) -> Counter[str]:
    """Check the episodes of all launches; return how often each reason ended one.

    After a resume none is begun whose prompt was trained before it, however many there were.
    """
    reasons = Counter(
        reason for ends in reasons_by_group(run_dir / "episodes.jsonl").values() for reason in ends
    )
    assert reasons.keys() <= set(map(str, EndReason)), reasons
    assert max(lifetimes_s(notes)) < DEADLINE_S + NOTICED_S
    step_of: dict[int, set[int]] = {}
    for row in read_rows(run_dir / "samples.jsonl"):
        step_of.setdefault(row["prompt_index"], set()).add(row["step"])
    assert all(len(steps) == 1 for steps in step_of.values()), step_of
    trained: set[int] = set()
    found = 0
    for row in read_rows(run_dir / "episodes.jsonl"):
        if "resumed_after" in row:
            trained = {i for i, steps in step_of.items() if min(steps) <= row["resumed_after"]}
            assert trained, f"{row}: no step before it has samples"
            found += 1
        assert row.get("prompt_index") not in trained, f"{row} was trained before the resume"
    assert found == num_resumes
    return reasons


def survive(
    begin: Start,
    folder: Path,
    kind: str,
    mode: str,
    launches: Sequence[tuple[Mapping[str, int], signal.Signals]],
) -> Chaos:
    """Kill parts of a run, end it, resume it, and so on."""
    chaos = Chaos(len(launches))
    for budget, end in launches:
        run = begin(*KINDS[kind](folder), *MODES[mode])
        chaos.strike(run, budget)
        chaos.end(run, end)
    reasons = check(folder / "run", folder / "notes", num_resumes=len(launches) - 1)
    print(f"{kind} {mode}: killed {dict(chaos.kills)}; ends {dict(reasons)}")
    assert reasons["done"] and reasons["aborted"]
    return chaos


@pytest.mark.slow
def test_a_few_deaths_leave_the_log_complete(begin: Start, tmp_path: Path) -> None:
    budget = {"worker": 1, "program": 2, "collector": 1}
    chaos = survive(begin, tmp_path, "programs", "async", [(budget, signal.SIGINT)])
    assert chaos.kills.total() == 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_many_deaths_and_resumes_leave_the_log_complete(
    begin: Start, tmp_path: Path, kind: str, mode: str
) -> None:
    """A quarter of a hundred deaths for each kind and mode."""
    client = "tool" if kind == "tools" else "program"
    budget = {"worker": 4, client: 6, "collector": 1}
    first, second = ({**budget, server: 1} for server in ("engine", "scheduler"))
    launches = [(first, signal.SIGKILL), (second, signal.SIGINT)]
    assert survive(begin, tmp_path, kind, mode, launches).kills.total() == 25
