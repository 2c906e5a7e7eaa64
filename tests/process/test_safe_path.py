"""A working folder with modules of the standard library's names harms no process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.agents.environments.check import check
from mcore_rl.agents.environments.worker_process import EnvironmentOptions
from mcore_rl.cli import main
from mcore_rl.cpu.fork_server import fork_server
from mcore_rl.process import safe_path
from mcore_rl.process.fork_request import fork_child
from mcore_rl.process.supervised import SupervisedServer, SupervisedSpec
from mcore_rl.rollout.engine import SERVER
from tests.support import forking
from tests.support.policy import ROOT, python_files, read

SHADOWS = ("random", "queue", "copy", "json", "stat", "types", "tempfile", "socket", "code")
SPAWNS = """
import multiprocessing
if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=print, args=("spawned",))
    worker.start()
    worker.join()
    print("status", worker.exitcode)
"""
ENVIRONMENT = """
import helper
class Environment:
    async def reset(self, task): ...
    async def step(self, message): ...
    async def close(self): ...
"""


@pytest.fixture
def shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, whose modules end any process that imports them."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('shadowed by {name}.py')\n")
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, paths)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(safe_path.SAFE_PATH, raising=False)
    return tmp_path


def run(*command: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)


def test_python_alone_would_take_them(shadowed: Path) -> None:
    done = run(sys.executable, "-m", "mcore_rl.cli", "--version")
    assert done.returncode == 1 and "shadowed by" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        [*safe_path.safe_module("mcore_rl.process.parent_death"), str(os.getpid()), "/bin/true"],
        [*safe_path.safe_module("mcore_rl.cli"), "--version"],
        [
            sys.executable,
            *SERVER[:-1],
            "mcore_rl.process.parent_death",
            str(os.getpid()),
            "/bin/true",
        ],
        [*safe_path.start_module(sys.executable, "mcore_rl.cli"), "--version"],
    ],
    ids=["parent_death", "cli", "server", "start"],
)
def test_our_commands_do_not(shadowed: Path, command: list[str]) -> None:
    done = run(*command)
    assert done.returncode == 0, done.stderr


def test_what_multiprocessing_spawns_does_not(shadowed: Path) -> None:
    script = shadowed / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(SPAWNS)
    assert "status 1" in run(sys.executable, str(script)).stdout
    for command, variables in (
        ([sys.executable, "-P", str(script)], {}),
        ([sys.executable, str(script)], {safe_path.SAFE_PATH: "mcore_rl"}),
    ):
        assert run(*command, **variables).stdout == "spawned\nstatus 0\n"


def test_forks_do_not(shadowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(forking.CAN_FORK, "yes")
    script = shadowed / "elsewhere.py"
    script.write_text("import statistics, sys; sys.exit(7)")
    (shadowed / "statistics.py").write_text("raise SystemExit('shadowed')")
    with (
        fork_server("MCORE_RL_TEST_FORKS", forking.__name__),
        open(os.devnull, "r+") as nothing,
    ):
        path = os.environ["MCORE_RL_TEST_FORKS"]
        forked = fork_child(path, [str(script)], os.environ, [nothing.fileno()] * 3)
        assert forked is not None and forked.wait() == 7


def test_servers_beside_a_run_do_not(shadowed: Path) -> None:
    code = "print('begun', flush=True); import time; time.sleep(60)"
    command = (sys.executable, "-P", "-c", code)
    spec = SupervisedSpec(
        name="server", command=command, health_url="http://[::1]:9", log_path=shadowed / "log"
    )
    server = SupervisedServer(spec)
    try:
        with pytest.raises(TimeoutError, match="begun"):
            server.wait_healthy(4.0)
    finally:
        server.stop()


def test_modules_of_environments_come_after_pythons(shadowed: Path) -> None:
    (shadowed / "mine.py").write_text(ENVIRONMENT)
    (shadowed / "helper.py").write_text("")
    check(EnvironmentOptions(kind="mine:Environment"))


def test_commands_keep_the_path_of_what_they_start_safe(
    shadowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(safe_path.SAFE_PATH, "")  # restored afterwards
    del os.environ[safe_path.SAFE_PATH]
    assert main(["report", "/nowhere"]) == 2
    assert os.environ[safe_path.SAFE_PATH]
    assert safe_path.SAFE_PATH not in safe_path.without_safe_path(os.environ)
    safe_path.let_programs_be()
    assert safe_path.SAFE_PATH not in os.environ


def test_a_variable_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(safe_path.SAFE_PATH, "1")
    safe_path.keep_path_safe()
    safe_path.let_programs_be()
    assert os.environ[safe_path.SAFE_PATH] == "1"
    assert safe_path.without_safe_path({safe_path.SAFE_PATH: "1"}) == {safe_path.SAFE_PATH: "1"}


def test_the_folder_of_the_user_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/mine", "", "/lib"])
    monkeypatch.setenv("PYTHONPATH", "/lib:/other")
    safe_path.put_last("/mine")
    assert sys.path == ["/lib", "/mine"]
    safe_path.put_last("/lib")
    assert sys.path == ["/lib", "/mine"], "PYTHONPATH names it"


def test_no_process_is_started_with_the_working_folder_first() -> None:
    starts = [
        str(path)
        for path in python_files("mcore_rl", "launch", "checkpoint_tools")
        if any(f'{python}, "-m"' in read(path) for python in ("sys.executable", "python"))
    ]
    assert not starts, f"use process.safe_path: {starts}"


def test_a_checkout_that_is_not_installed_is_found_by_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/other")
    monkeypatch.setattr(sys, "path", [str(ROOT), "/lib"])
    safe_path.keep_path_safe()
    assert os.environ["PYTHONPATH"] == f"{ROOT}{os.pathsep}/other"
    safe_path.keep_path_safe()
    assert os.environ["PYTHONPATH"] == f"{ROOT}{os.pathsep}/other"
    monkeypatch.setattr(sys, "path", ["/bin", str(ROOT)])
    monkeypatch.delenv("PYTHONPATH")
    safe_path.keep_path_safe()
    assert "PYTHONPATH" not in os.environ
