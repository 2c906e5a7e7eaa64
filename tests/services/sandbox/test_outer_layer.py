"""Bubblewrap around a warden: programs run, nothing outlives, and a machine without it is told."""

import os
import shutil
import threading
import time

import psutil
import pytest

from mcore_rl.services.sandbox.box import ProgramBox, Streams
from mcore_rl.services.sandbox.languages import readable_paths
from mcore_rl.services.sandbox.limits import BoxStep, Limits, SandboxError
from mcore_rl.services.sandbox.worker import Worker, outer_command
from tests.support.sandboxes import PROGRAM, descendants, run, wait_until

has_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")


def make() -> Worker:
    return Worker(readable_paths({}), bubblewrap=True)


def test_a_machine_without_bubblewrap_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match=r"no bwrap .*sandbox.bubblewrap=true.*install"):
        outer_command(["/usr"])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SandboxError, match="no bwrap"):
        make()
    assert len(os.listdir("/proc/self/fd")) == before


@has_bubblewrap
def test_it_shows_what_it_is_given() -> None:
    words = outer_command(["/usr/lib", "/usr"], ["/tmp/tasks"])
    joined = " ".join(words)
    assert "--ro-bind /usr /usr --ro-bind /usr/lib /usr/lib" in joined
    assert "--bind /tmp/tasks /tmp/tasks" in joined
    assert words[-4:] == ["--", "/usr/bin/env", "-u", "PWD"] and "--unshare-net" in words
    assert ("--unshare-user" in words) == (os.geteuid() != 0)


@has_bubblewrap
def test_programs_run_in_both_layers() -> None:
    worker = make()
    try:
        assert "bwrap" in " ".join(psutil.Process(worker.pid).cmdline())
        source = "import os; print(os.getuid(), os.getpid(), os.path.exists('/proc'))"
        assert run(worker, source).stdout == b"1000 2 False\n"
        assert run(worker, "import os; print('PWD' in os.environ)").stdout == b"False\n"
    finally:
        worker.close()


@has_bubblewrap
@pytest.mark.parametrize("way", ["close", "retire"])
def test_its_end_ends_a_running_program(way: str) -> None:
    worker = make()
    box = ProgramBox(worker, Limits())
    box.put({"program.py": b"import time; time.sleep(300)"})
    streams = Streams(100)
    box.start(BoxStep(program=PROGRAM, limits=Limits(wall_s=300)), streams)
    wait_until(lambda: len(descendants(worker.pid)) == 4, "the program started")
    left = descendants(worker.pid)
    getattr(worker, way)()
    _, alive = psutil.wait_procs(left, timeout=30)
    assert not alive
    worker.close()
    streams.close()
    box._call.close()


@has_bubblewrap
def test_a_thread_that_started_it_may_end() -> None:
    workers: list[Worker] = []
    thread = threading.Thread(target=lambda: workers.append(make()))
    thread.start()
    thread.join()
    time.sleep(0.2)
    try:
        assert run(workers[0], "print(1)").stdout == b"1\n"
    finally:
        workers[0].close()
