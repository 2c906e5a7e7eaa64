"""Debuggers attach to a user's code wherever it runs: a reward in a collector, an advantage in the
controller, a loss in a rank. Tests do what the run tells its user to do.
"""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.debuggers import DebugAdapter, ray_debug, wait_for_match
from tests.support.runs import Run, tiny_settings
from tests.support.submitted import SubmittedRun

pytestmark = pytest.mark.e2e

REWARD = """
stopped = False


def reward(*, data_source, solution_str, ground_truth, extra_info):
    global stopped
    seen = "a reward"
    if not stopped:
        stopped = True
        breakpoint()
    return float(len(solution_str) % 3)
"""
ALGORITHM = """
import torch
import torch.distributed as dist

from mcore_rl.algo.registry import Needs, advantages, losses

stopped = set()


@advantages.register("stopping", Needs(), sees="samples")
def stopping_advantage(outcomes, config):
    seen = "an advantage"
    if "advantage" not in stopped:
        stopped.add("advantage")
        breakpoint()
    return outcomes.spread(outcomes.scores_N)


@losses.register("stopping")
def make_loss(config):
    def loss(tokens):
        seen = f"the loss of {len(tokens.advantages_T)} tokens"
        if "loss" not in stopped and dist.get_rank() == 0:
            stopped.add("loss")
            breakpoint()
        return -tokens.advantages_T * tokens.log_ratio_T.exp(), {}

    return loss
"""
SETTINGS = (
    "algorithm.advantage=stopping",
    "algorithm.loss=stopping",
    "parallel.ep=2",
    "run.debug=true",
    "run.steps=1",
    "eval.data=[]",
    "checkpoint.export_hf=false",
)
TOLD = r"mcore-rl: (breakpoint\(\) in {who} at \S+:\d+ waits for .*)\n"
# Ray names the call in a process's title; in a collector, only until one of its calls ends.
WHO = (r"ray::collector_rank0(?:\.call)?", "the controller", r"ray::trainer_rank0\.call")
VALUES = (r"a reward", r"an advantage", r"the loss of \d+ tokens")


@pytest.fixture
def code(tmp_path: Path) -> list[str]:
    """The settings that name the files with the user's code."""
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "algorithm.py").write_text(ALGORITHM)
    return [f"reward.path={tmp_path}/reward.py", f"algorithm.path={tmp_path}/algorithm.py"]


def told(run: Run, index: int, who: str) -> str:
    """Wait until the run tells of its breakpoint number `index`, that of `who`; return that."""

    def later() -> str:
        lines = run.tail(100_000).splitlines(keepends=True)
        found = [line for line in lines if line.startswith("mcore-rl: breakpoint()")]
        return "".join(found[index:])

    run.wait_until(later, f"breakpoint {index}")
    match = re.match(TOLD.format(who=who), later())
    assert match, later()
    return match[1]


@pytest.mark.slow
def test_ray_debug_attaches_to_reward_loop_and_rank(
    start: Callable[..., Run], code: list[str]
) -> None:
    lifted = ("run.call_timeout_s=4", "reward.timeout_s=1", "reward.workers=2")
    run = start("train", *SETTINGS, *code, *lifted)
    for index, value in enumerate(VALUES):
        how = told(run, index, WHO[index])
        time.sleep(5)  # longer than the deadlines that run.debug lifts
        printed = ray_debug(how, "p seen", "continue")
        assert re.search(f"'{value}'", printed), printed
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    [row] = [row for row in run.metrics() if "reward/mean" in row]
    assert row["reward/errors"] == 0


@pytest.mark.slow
def test_ray_debug_attaches_to_the_controller_of_a_submitted_run(
    arithmetic: Path, code: list[str], tmp_path: Path
) -> None:
    words = (*tiny_settings(arithmetic), *SETTINGS, code[1], "algorithm.loss=ppo_clip")
    run = SubmittedRun((*words, "parallel.ep=1", "launch=local"), tmp_path / "run")
    try:
        printed = wait_for_match(TOLD.format(who="the controller"), run.printed, 120)[1]
        assert "RAY_AUTH_TOKEN_PATH=" in printed
        assert "'an advantage'" in ray_debug(printed, "p seen", "continue")
        run.wait_ended()
        run.wait_until_nothing_is_left()
    finally:
        run.kill()


@pytest.mark.slow
def test_a_debug_adapter_attaches_where_the_dashboard_shows(
    start: Callable[..., Run],
    code: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_DEBUG", "1")
    run = start("train", *SETTINGS, *code, "cluster.dashboard=true")
    url = wait_for_match(r"dashboard is at (http://127\.0\.0\.1:\d+), ", run.tail, 60)[1]
    with pytest.raises(urllib.error.HTTPError, match="403"):
        workers(url, token="another")
    for index, value in enumerate(VALUES):
        how = told(run, index, WHO[index])
        host, port = re.findall(r"debugpy's protocol at (\S+):(\d+)$", how)[0]
        paused = [w for w in workers(url) if w["num_paused_threads"]]
        assert [w["debugger_port"] for w in paused] == [int(port)]
        client = DebugAdapter(host, int(port))
        client.attach()
        thread, frame = client.stopped_frame()
        assert Path(frame["source"]["path"]).parent == tmp_path
        assert re.fullmatch(f"'{value}'", client.evaluate("seen", frame))
        client.go_on(thread)
        client.leave()
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()


def workers(url: str, token: str | None = None) -> list[dict[str, Any]]:
    """Ask the dashboard for all workers, as the extension of VS Code does."""
    if token is None:
        token = (Path.home() / ".ray" / "auth_token").read_text().strip()
    query = f"{url}/api/v0/workers?detail=true&limit=1000"
    request = urllib.request.Request(query, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)["data"]["result"]["result"]
