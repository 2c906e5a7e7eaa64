"""Workers are forked with an environment of their own; nothing of the process stays."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from mcore_rl.cluster import worker_forks, worker_setup

WORKER = """
import os, signal, sys, tempfile
print(os.getppid(), "megatron.core" in sys.modules, "ray" in sys.modules)
print(os.environ["COLOR"], os.getcwd(), tempfile.gettempdir(), sys.argv[1:])
print(*(number.name for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())))
"""
CONTROLLER = """
import os
from mcore_rl.cluster.worker_forks import worker_forks
with worker_forks():
    print(os.environ["MCORE_RL_WORKER_FORKS"], flush=True)
    input()
"""


def forking() -> psutil.Process:
    """Return this process's child that forks workers."""
    [process] = [
        child for child in psutil.Process().children() if worker_forks.__name__ in child.cmdline()
    ]
    return process


@contextmanager
def blocked(number: int) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_worker_is_a_fork_with_what_it_was_started_with(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with worker_forks.worker_forks():
        command = [sys.executable, worker_setup.__file__, str(script), "--language=PYTHON", "--a=1"]
        environment = {**os.environ, "COLOR": "green", "TMPDIR": str(tmp_path)}
        with (tmp_path / "out").open("w+") as out:
            with blocked(signal.SIGINT):  # as by Ray's node
                subprocess.run(command, env=environment, cwd=tmp_path, stdout=out, check=True)
            process = forking()
            while process.children():
                pass
            out.seek(0)
            lines = out.read().splitlines()
        assert process.num_fds() < 10  # none of the worker's
    assert lines == [
        f"{process.pid} True False",
        f"green {tmp_path} {tmp_path} ['--a=1']",
        "SIGINT",
    ]
    assert worker_setup.FORKS not in os.environ and not process.is_running()


def test_nothing_is_left_of_it_when_the_controller_is_killed() -> None:
    command = [sys.executable, "-c", CONTROLLER]
    controller = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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
        assert not worker_forks._is_alone()
    finally:
        end.set()
        thread.join()


def test_what_is_imported_exists_and_starts_no_thread() -> None:
    code = (
        "import sys; from importlib import import_module as i;"
        " from mcore_rl.cluster.worker_forks import _is_alone as a;"
        " print(*((i(module), a())[1] for module in sys.argv[1:]))"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *worker_forks.MODULES],
        env={**os.environ, **worker_forks.ONE_THREAD},
        capture_output=True,
        text=True,
        check=True,
    )
    alone = dict(zip(worker_forks.MODULES, ended.stdout.split(), strict=True))
    assert alone == dict.fromkeys(worker_forks.MODULES, "True")  # the first other one did it
