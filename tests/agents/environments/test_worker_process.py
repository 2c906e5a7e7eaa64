"""Workers start, die and are killed with everything below them."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.agents.environments import worker_process
from mcore_rl.agents.environments.environment import EnvironmentFailedError, EnvironmentLostError
from mcore_rl.agents.environments.worker_process import (
    EnvironmentOptions,
    make_import_folder,
    make_worker_environment,
)
from tests.agents.environments.episodes import all_gone
from tests.agents.environments.pools import COUNTDOWN, TASK, answer, in_pool, play


def test_a_worker_that_hangs_as_a_whole_is_killed():
    async def use(pool):
        bystander = await pool.open(TASK)
        pid = int((await bystander.step(answer())).metrics["pid"])
        with pytest.raises(EnvironmentLostError, match="does not answer any more: it was killed"):
            await play(pool, ["HOLD"])
        with pytest.raises(EnvironmentLostError):
            await bystander.step(answer())
        assert not all_gone([pid])
        return await play(pool)

    assert in_pool(use, kind=COUNTDOWN, step_timeout_s=0.5)[-1].done


@pytest.mark.parametrize("stops_keeper", [False, True])
def test_a_worker_that_is_stopped_is_killed(monkeypatch, stops_keeper: bool):
    monkeypatch.setattr(worker_process, "STOPPED_S", 1)

    async def use(pool):
        episode = await pool.open(TASK)
        pid = int((await episode.step(answer())).metrics["pid"])
        os.kill(pool._workers[0]._process.pid if stops_keeper else pid, signal.SIGSTOP)
        with pytest.raises(EnvironmentLostError, match=r"was stopped \(state T\) for 1 s"):
            await episode.step(answer("SLEEP 30"))
        assert not all_gone([pid])
        return await play(pool)

    assert in_pool(use, kind=COUNTDOWN)[-1].done


def test_a_worker_over_its_memory_is_killed():
    async def use(pool):
        assert await play(pool, ["ALLOCATE 1000"])
        with pytest.raises(
            EnvironmentLostError, match=r"took more than 0.25 GiB .* raise memory_gib"
        ):
            await play(pool, ["ALLOCATE 500000000", "SLEEP 30"])

    in_pool(use, kind=COUNTDOWN, memory_gib=0.25)


def test_a_program_ends_although_its_keeper_was_killed(tmp_path):
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    task = {"index": 7, "gateway_url": "http://127.0.0.1:1", "gateway_key": "none"}

    async def use(pool):
        running = asyncio.ensure_future(pool.run(task))
        while not (pid_file.exists() and pid_file.read_text()):
            await asyncio.sleep(0.05)
        os.kill(pool._workers[0]._process.pid, signal.SIGKILL)
        with pytest.raises(EnvironmentLostError, match="died with status -9"):
            await running
        assert not all_gone([int(pid_file.read_text())])

    in_pool(use, kind="command", options={"command": [sys.executable, "-c", code]})


def test_an_interpreter_that_is_not_there_is_named():
    async def use(pool):
        with pytest.raises(
            EnvironmentFailedError, match="/no/python cannot be started as worker 0"
        ):
            await pool.open(TASK)

    in_pool(use, kind=COUNTDOWN, python="/no/python")


def test_a_foreign_interpreter_inherits_no_paths(tmp_path, monkeypatch):
    make_import_folder(tmp_path)
    assert (tmp_path / "mcore_rl/agents/environments/worker.py").is_file()
    monkeypatch.setenv("PYTHONPATH", "/mine")
    own = make_worker_environment(EnvironmentOptions("a:B"), tmp_path)
    foreign = make_worker_environment(EnvironmentOptions("a:B", python="/other"), tmp_path)
    given = {"PYTHONPATH": "/given", "OMP_NUM_THREADS": "2"}
    told = make_worker_environment(
        EnvironmentOptions("a:B", python="/o", variables=given), tmp_path
    )
    assert own["PYTHONPATH"] == f"{tmp_path}:/mine"
    assert foreign["PYTHONPATH"] == str(tmp_path)
    assert told["PYTHONPATH"] == f"{tmp_path}:/given" and told["OMP_NUM_THREADS"] == "2"
    assert Path(own["TMPDIR"]).is_dir()


SCRIPT = """
import asyncio, os, sys
from mcore_rl.agents.environments.worker_process import EnvironmentOptions
from mcore_rl.agents.environments.pool import EnvironmentPool
from mcore_rl.agents.environments.keeper import list_descendants

async def main():
    options = EnvironmentOptions(sys.argv[1], workers=2, episodes_per_worker=4)
    async with EnvironmentPool(options) as pool:
        opened = [await pool.open({"index": n}) for n in range(4)]
        await opened[0].step({"content": "DETACH 300"})
        print(*list_descendants(os.getpid()), flush=True)
        await opened[1].step({"content": "SLEEP 300"})

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_a_pool_whose_process_gets_a_signal(number, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, COUNTDOWN],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    names = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] for pid in pids]
    assert names.count(b"sleep") == 1 and len(pids) == 5, names
    process.send_signal(number)
    process.wait(timeout=30)
    assert not all_gone(pids)
    assert not [path for path in tmp_path.rglob("*") if path.is_socket()]


def test_secrets_of_this_process_are_not_inherited(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijkl")
    monkeypatch.setenv("GAME_LEVEL", "3")
    options = EnvironmentOptions("tools", variables={"SEARCH_API_KEY": "needed"})
    variables = make_worker_environment(options, tmp_path)
    assert "HF_TOKEN" not in variables
    assert variables["GAME_LEVEL"] == "3" and variables["SEARCH_API_KEY"] == "needed"
