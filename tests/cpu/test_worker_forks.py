"""Workers are forked with what they need imported, and with an environment of their own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from mcore_rl.cluster import worker_setup
from mcore_rl.cpu import worker_forks
from mcore_rl.cpu.fork_server import ONE_THREAD

WORKER = """
import os, signal, sys, tempfile
print(os.getppid(), "megatron.core" in sys.modules, "ray" in sys.modules)
print(os.environ["COLOR"], os.getcwd(), tempfile.gettempdir(), sys.argv[1:])
print(*(number.name for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())))
"""


def forking() -> psutil.Process:
    """Return this process's newest child that forks workers."""
    found = [p for p in psutil.Process().children() if worker_forks.__name__ in p.cmdline()]
    return max(found, key=psutil.Process.create_time)


@contextmanager
def blocked(number: int) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_worker_is_a_fork_with_what_it_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(worker_setup.FORKS, raising=False)
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
    assert lines == [
        f"{process.pid} True False",
        f"green {tmp_path} {tmp_path} ['--a=1']",
        "SIGINT",
    ]


@pytest.mark.slow
def test_what_is_imported_exists_and_starts_no_thread() -> None:
    code = (
        "import sys; from importlib import import_module as i;"
        " from mcore_rl.cpu.fork_server import is_alone as a;"
        " print(*((i(module), a())[1] for module in sys.argv[1:]))"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *worker_forks.MODULES],
        env={**os.environ, **ONE_THREAD},
        capture_output=True,
        text=True,
        check=True,
    )
    alone = dict(zip(worker_forks.MODULES, ended.stdout.split(), strict=True))
    assert alone == dict.fromkeys(worker_forks.MODULES, "True")  # the first other one did it
