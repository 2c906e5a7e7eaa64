"""Programs run episodes in a worker: started, bounded in time and output, scored, and killed."""

import asyncio
import json
import sys
import time
from pathlib import Path

import pytest

from mcore_rl.agents.environments import pool
from mcore_rl.agents.environments.command import (
    CommandOptions,
    find_inner_path,
    make_gateway_variables,
    read_reward,
)
from mcore_rl.agents.environments.environment import EnvironmentFailedError
from mcore_rl.agents.environments.pool import EnvironmentPool
from mcore_rl.agents.environments.worker_process import EnvironmentOptions
from tests.agents.environments.episodes import all_gone

TASK = {
    "messages": [{"role": "user", "content": "Say hi."}],
    "data_source": "shell",
    "index": 4,
    "sample_index": 0,
    "gateway_url": "http://127.0.0.1:9/session/7",
    "gateway_key": "secret",
    "extra_info": {"files": {"data/a.txt": "alpha"}},
}


def python(code, *arguments):
    return [sys.executable, "-c", f"import json, os, subprocess, sys, time\n{code}", *arguments]


def run(options, task=TASK, **pool_options):
    async def play():
        given = EnvironmentOptions("command", options, workers=1, **pool_options)
        async with EnvironmentPool(given) as pool:
            return await pool.run(task)

    return asyncio.run(play())


def test_a_program_finds_task_files_and_gateway_and_prints_its_reward(tmp_path):
    code = (
        "task = json.load(open('task.json'))\n"
        "names = ['OPENAI_BASE_URL', 'OPENAI_API_KEY', 'ANTHROPIC_BASE_URL', 'LEVEL', 'HOME']\n"
        "print([os.environ[name] for name in names], 'PYTHONPATH' in os.environ)\n"
        "print(sys.argv[1:], open('data/a.txt').read(), open('b').read(), task['index'])\n"
        "print('gateway_key' in task, json.dumps({'reward': 0.25}))\n"
        "print(json.dumps({'reward': 0.75}))\nprint('bye')"
    )
    options = {
        "command": python(code, "{prompt}", "{folder}/x"),
        "files": {"b": "beta"},
        "variables": {"LEVEL": "3"},
        "output_folder": str(tmp_path),
    }
    result = run(options)
    assert (result.reward, result.end_reason, result.detail) == (0.75, "done", "")
    assert 0 < result.metrics["program/seconds"] < 30
    (log,) = tmp_path.iterdir()
    assert log.name.startswith("shell_4_0_")
    lines = log.read_text().splitlines()
    folder = lines[0].split("'")[-2]
    url = "http://127.0.0.1:9/session/7"
    assert lines[0] == f"{[url + '/v1', 'secret', url, '3', folder]} False"
    assert lines[1] == f"{['Say hi.', folder + '/x']} alpha beta 4"
    assert lines[2].startswith("False")
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    ("code", "reward"),
    [("print('{\"reward\": -2}'); sys.exit(1)", -2.0), ("sys.exit(0)", 1.0), ("sys.exit(1)", 0.0)],
)
def test_a_command_scores_what_the_program_left(code, reward):
    score = f"assert open('made').read() == 'x'\n{code}"
    result = run({"command": python("open('made', 'w').write('x')"), "score": python(score)})
    assert (result.reward, result.end_reason) == (reward, "done")


def test_a_program_that_ends_at_its_deadline_is_scored(monkeypatch):
    monkeypatch.setattr(pool, "_RUN_GRACE_S", -1800.0)  # as if the program had taken all its time
    options = {"command": ["true"], "score": ["true"], "score_timeout_s": 60.0}
    result = run(options, run_timeout_s=1800.0)
    assert (result.reward, result.end_reason) == (1.0, "done")


def test_only_a_score_takes_time_after_the_deadline():
    assert CommandOptions(["true"], score_timeout_s=9.0).after_deadline_s == 0.0
    assert CommandOptions(["true"], score=["true"], score_timeout_s=9.0).after_deadline_s == 9.0


def test_a_program_that_fails_has_no_reward_but_the_end_of_its_output():
    result = run({"command": python("print('{\"reward\": 1}'); sys.exit('no model')")})
    assert (result.reward, result.end_reason) == (None, "tool_error")
    assert result.detail.startswith("it ended with status 1; its output ends:\n")
    assert result.detail.endswith("no model")


def test_a_program_past_its_deadline_is_killed_with_its_group(tmp_path):
    pids = tmp_path / "pids"
    # A shell starts in milliseconds: the deadline counts from before that.
    script = 'trap "" TERM; sleep 300 & echo "$$ $!" > "$0"; wait'
    began_s = time.monotonic()
    result = run({"command": ["sh", "-c", script, str(pids)]}, run_timeout_s=1.5)
    assert (result.reward, result.end_reason) == (None, "deadline")
    assert result.detail == "it took more than 1.5 s"
    assert time.monotonic() - began_s < 60
    leader, child = (int(pid) for pid in pids.read_text().split())
    assert not all_gone([leader, child])


def test_a_canceled_run_kills_the_program_and_gives_back_its_place(tmp_path):
    pid_file = tmp_path / "pid"
    code = f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)"

    async def play():
        options = EnvironmentOptions(
            "command", {"command": python(code)}, workers=1, episodes_per_worker=1
        )
        async with EnvironmentPool(options) as pool:
            running = asyncio.ensure_future(pool.run(TASK))
            while not (pid_file.exists() and pid_file.read_text()):
                await asyncio.sleep(0.05)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            pid = int(pid_file.read_text())
            left = await asyncio.to_thread(all_gone, [pid], 5.0)
            return left, [worker.episodes for worker in pool._workers]

    assert asyncio.run(play()) == ([], [set()])


def test_an_endless_output_is_bounded(tmp_path):
    code = "print('begin'); print('x' * 3_000_000); print('end')"
    run({"command": python(code), "output_folder": str(tmp_path), "output_bytes": 1000})
    (log,) = tmp_path.iterdir()
    text = log.read_text()
    assert text.startswith("begin\nxxx") and text.endswith("xxx\nend\n") and len(text) < 1100


def test_a_task_without_a_gateway_is_named():
    with pytest.raises(EnvironmentFailedError, match="ValueError: the task has no gateway_url"):
        run({"command": ["true"]}, task={**TASK, "gateway_url": ""})


def test_the_address_of_the_gateway_may_end_in_v1_and_lie_in_extra_info():
    given = {"extra_info": {"gateway_url": "http://host/s/1/v1/", "gateway_key": "k"}}
    found = make_gateway_variables(given)
    assert found["OPENAI_BASE_URL"] == "http://host/s/1/v1"
    assert found["ANTHROPIC_BASE_URL"] == "http://host/s/1"


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ('{"reward": 1}\n{"reward": 2}\nbye\n', 2.0),
        ('{"reward": NaN}', None),
        ('{"reward": "high"}\n{broken', None),
        ("", None),
        (json.dumps({"other": 1}), None),
    ],
)
def test_the_last_finite_reward_counts(output, reward):
    assert read_reward(output) == reward


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", ""])
def test_files_stay_in_the_folder(name):
    with pytest.raises(ValueError, match="lies outside of the working folder"):
        find_inner_path(Path("/work"), name)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"command": "ls -l"}, "command is 'ls -l': a list"),
        ({"command": []}, r"command is \[\]"),
        ({"command": ["no-such-program"]}, "there is no program 'no-such-program'"),
        ({"command": ["true"], "score": "x"}, "score is 'x': a list"),
        ({"command": ["true"], "output_bytes": 1}, "output_bytes is 1"),
        ({"command": ["true"], "files": {"/x": ""}}, "files: '/x'"),
    ],
)
def test_senseless_options_are_named(given, text):
    with pytest.raises(ValueError, match=text):
        CommandOptions(**given)
