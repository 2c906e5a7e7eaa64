"""Forks are what they were asked to be, and end with whoever asked; nothing of the server stays."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mcore_rl.cpu import fork_server
from mcore_rl.process.fork_request import ForkedProcess, fork_child
from tests.support import forking

FORKS = "MCORE_RL_TEST_FORKS"
SAYS = """
import os, signal, sys, tempfile
print(os.getppid(), os.getpgid(0) == os.getpid(), sys.argv[1:-1], flush=True)
print(os.environ["COLOR"], os.getcwd(), sys.path[0], tempfile.gettempdir(), flush=True)
print(*(number.name for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())))
print(len(os.listdir("/proc/self/fd")), open(int(sys.argv[-1])).read())
sys.exit(3)
"""
SLEEPS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid)
time.sleep(600)
"""
OWNER = """
import os, sys, time
from mcore_rl.process.fork_request import fork_child
fork = fork_child(sys.argv[1], [sys.argv[2]], dict(os.environ), [0, 1, 2])
time.sleep(600)
"""
CONTROLLER = """
import os
from mcore_rl.cpu.fork_server import fork_server
with fork_server("FORKS", "tests.support.forking"):
    print(os.environ["FORKS"], flush=True)
    input()
"""


@pytest.fixture(scope="module")
def path() -> Iterator[str]:
    os.environ[forking.CAN_FORK] = "yes"
    with fork_server.fork_server(FORKS, forking.__name__):
        yield os.environ[FORKS]
    del os.environ[forking.CAN_FORK]


def server() -> psutil.Process:
    [process] = [
        child for child in psutil.Process().children() if forking.__name__ in child.cmdline()
    ]
    return process


def fork(
    path: str, folder: Path, script: str, *arguments: str, **variables: str
) -> ForkedProcess | None:
    """Have a script forked whose output goes to a file."""
    (folder / "script.py").write_text(script)
    environment = {**os.environ, **variables}
    with (folder / "out").open("w") as out, open(os.devnull) as nothing:
        streams = [nothing.fileno(), out.fileno(), out.fileno()]
        with (folder / "given").open("w+") as given:
            given.write("a file")
            given.seek(0)
            command = [str(folder / "script.py"), *arguments]
            return fork_child(path, command, environment, streams, [given.fileno()])


def printed(folder: Path) -> list[str]:
    return (folder / "out").read_text().splitlines()


def first_number(folder: Path) -> int:
    """Wait for the script's first line, which is a number."""
    while not (lines := printed(folder)):
        time.sleep(0.01)
    return int(lines[0])


def test_a_fork_is_what_was_asked_for(path: str, tmp_path: Path) -> None:
    variables = {"COLOR": "green", "TMPDIR": str(tmp_path)}
    forked = fork(path, tmp_path, SAYS, "--a=1", **variables)
    assert forked is not None
    assert forked.wait() == 3, printed(tmp_path)
    assert printed(tmp_path) == [
        f"{server().pid} True ['--a=1']",
        f"green {os.getcwd()} {os.getcwd()} {tmp_path}",
        "",
        "5 a file",
    ]
    assert server().num_fds() < 10  # none of the fork's


def test_ps_shows_the_variables_of_a_fork(path: str, tmp_path: Path) -> None:
    forked = fork(path, tmp_path, SLEEPS, "--b", COLOR="blue")
    assert forked is not None
    first_number(tmp_path)
    assert psutil.Process(forked.pid).environ()["COLOR"] == "blue"
    os.killpg(forked.pid, signal.SIGKILL)
    assert forked.wait() == -signal.SIGKILL


def test_a_free_fork_outlives_whoever_asked_in_a_group_of_its_own(
    path: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SLEEPS)
    code = (
        "import sys; from mcore_rl.process.fork_request import fork_detached;"
        " assert fork_detached(sys.argv[1], [sys.argv[2]])"
    )
    with (tmp_path / "out").open("w") as out:
        command = [sys.executable, "-c", code, path, str(tmp_path / "script.py")]
        subprocess.run(command, stdout=out, check=True)
    child = psutil.Process(first_number(tmp_path))
    parent = child.parent()
    assert parent is not None and parent.ppid() == server().pid
    assert os.getpgid(child.pid) == parent.pid != os.getpgid(server().pid)
    for process in (parent, child):
        process.kill()


def test_a_tied_fork_dies_with_its_owner_and_takes_its_group_along(
    path: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SLEEPS)
    with (tmp_path / "out").open("w") as out:
        command = [sys.executable, "-c", OWNER, path, str(tmp_path / "script.py")]
        owner = subprocess.Popen(command, stdout=out)
    processes = [psutil.Process(first_number(tmp_path))]
    processes.append(psutil.Process(os.getpgid(processes[0].pid)))
    owner.kill()
    owner.wait()
    gone, left = psutil.wait_procs(processes, timeout=10)
    assert len(gone) == 2 and not left


def test_a_tied_fork_dies_with_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(forking.CAN_FORK, "yes")
    with fork_server.fork_server("MCORE_RL_TEST_OTHER_FORKS", forking.__name__):
        path = os.environ["MCORE_RL_TEST_OTHER_FORKS"]
        forked = fork(path, tmp_path, SLEEPS)
        assert forked is not None
        child = psutil.Process(first_number(tmp_path))
        process = psutil.Process(forked.pid)
        parent = process.parent()
        assert parent is not None
        parent.kill()
        assert forked.wait() == -signal.SIGKILL
        psutil.wait_procs([process], timeout=10)
        assert not process.is_running()
        child.kill()
        assert fork(path, tmp_path, SLEEPS) is None


def test_what_imports_read_must_be_the_same(path: str, tmp_path: Path) -> None:
    assert fork(path, tmp_path, SAYS, SGLANG_SOMETHING="1") is None
    assert fork(path, tmp_path, SAYS, OMP_WAIT_POLICY="active") is None
    forked = fork(path, tmp_path, SAYS, OMP_NUM_THREADS="7", OMP_WAIT_POLICY="passive", COLOR="red")
    assert forked is not None and forked.wait() == 3, printed(tmp_path)


def test_one_that_cannot_fork_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(forking.CAN_FORK, raising=False)
    with fork_server.fork_server("MCORE_RL_TEST_OTHER_FORKS", forking.__name__):
        assert fork(os.environ["MCORE_RL_TEST_OTHER_FORKS"], tmp_path, SAYS) is None


def test_a_fork_that_cannot_become_what_it_was_asked_to_be_ends(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.setattr(os, "getcwd", lambda: str(gone))
    gone.rmdir()
    assert fork(path, tmp_path, SAYS) is None
    monkeypatch.undo()
    assert fork(path, tmp_path, "print(1)") is not None and first_number(tmp_path) == 1


def test_a_request_of_another_version_is_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps = json.dumps
    monkeypatch.setattr(json, "dumps", lambda request: dumps({**request, "new": 1}))
    assert fork(path, tmp_path, SAYS) is None
    monkeypatch.setattr(json, "dumps", lambda request: "no json")
    assert fork(path, tmp_path, SAYS) is None
    monkeypatch.undo()
    assert fork(path, tmp_path, "print(1)") is not None and first_number(tmp_path) == 1


def test_a_server_that_is_named_already_is_used(path: str) -> None:
    with fork_server.fork_server(FORKS, forking.__name__):
        assert os.environ[FORKS] == path
    assert os.environ[FORKS] == path and server().is_running()


def test_the_block_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "MCORE_RL_TEST_OTHER_FORKS"
    monkeypatch.setenv(name, "/nobody/listens/there")
    before = psutil.Process().children()
    with fork_server.fork_server(name, forking.__name__):
        [process] = set(psutil.Process().children()) - set(before)
        folder = Path(os.environ[name]).parent
    assert name not in os.environ and not process.is_running() and not folder.exists()


def test_nothing_is_left_of_it_when_whoever_started_it_is_killed() -> None:
    environment = {**os.environ, forking.CAN_FORK: "yes"}
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with controller:
        assert controller.stdout is not None
        path = Path(controller.stdout.readline().strip())
        [process] = psutil.Process(controller.pid).children()
        time.sleep(1.0)  # it looks after its parent first
        controller.send_signal(signal.SIGKILL)
    psutil.wait_procs([process], timeout=60)
    assert not process.is_running() and not path.parent.exists()


def test_a_process_with_another_thread_is_not_forked() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert not fork_server.is_alone()
    finally:
        end.set()
        thread.join()
