"""A worker's boxes end with it, and what it cannot do is an error of the sandbox."""

import errno
import os
import signal

import psutil
import pytest

from mcore_rl.services.sandbox.box import ProgramBox, Streams
from mcore_rl.services.sandbox.limits import BoxStep, Limits, SandboxError
from mcore_rl.services.sandbox.worker import Worker
from tests.support.sandboxes import PROGRAM, descendants, make_worker, run, wait_until


def test_a_closed_worker_leaves_no_process_and_no_descriptor() -> None:
    make_worker().close()
    before = len(os.listdir("/proc/self/fd"))
    worker = make_worker()
    pid = worker.pid
    assert run(worker, "print(2)").stdout == b"2\n"
    worker.close()
    assert not psutil.pid_exists(pid)
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_ends_a_running_program() -> None:
    worker = make_worker()
    box = ProgramBox(worker, Limits())
    box.put({"program.py": b"import time; time.sleep(300)"})
    streams = Streams(100)
    box.start(BoxStep(program=PROGRAM, limits=Limits(wall_s=300)), streams)
    wait_until(lambda: len(descendants(worker.pid)) == 2, "the program started")
    left = descendants(worker.pid)
    worker.close()
    _, alive = psutil.wait_procs(left, timeout=30)
    assert not alive
    streams.close()
    box._call.close()


def test_a_killed_warden_is_an_error_of_the_sandbox() -> None:
    worker = make_worker()
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="ended"):
        run(worker, "print(1)")
    worker.close()


def test_a_machine_without_the_means_is_named() -> None:
    with pytest.raises(SandboxError, match=r"no sandbox for programs .*Linux 5\.14"):
        Worker(["/none"])


def test_a_kernel_without_pidfd_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(SandboxError, match=r"pidfd_open: .*not implemented.* Linux 5\.14"):
        make_worker()
