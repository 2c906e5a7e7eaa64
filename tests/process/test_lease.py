"""One process leads a folder, however its hosts see one another's locks."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcore_rl.process import lease
from mcore_rl.process.file_lock import LockedError
from mcore_rl.process.lease import (
    BEAT_S,
    DEADLINE_S,
    hold_lease,
    read_boot_id,
)
from tests.support.small_disks import mounted

HOLDER = """
import os, sys, time
from pathlib import Path
from mcore_rl.process.lease import hold_lease

def end(message):
    print(message, flush=True)
    os._exit(7)

try:
    with hold_lease(Path(sys.argv[1]), False, end, beat_s=0.1, deadline_s=1.0):
        print("held", flush=True)
        time.sleep(float(sys.argv[2]))
except ValueError as error:
    print(error, flush=True)
"""
Start = Callable[..., subprocess.Popen]


@pytest.fixture(autouse=True)
def _confirm_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; other holders look again after as long as in a run."""
    monkeypatch.setattr(lease, "_CONFIRM_S", 0.3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.lease"


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    """Starts a process that holds the lease for some seconds, on a filesystem without locks."""
    processes: list[subprocess.Popen] = []

    def start_holder(seconds: float = 60.0) -> subprocess.Popen:
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", HOLDER, str(path), str(seconds)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(Path.cwd())},
            )
        )
        return processes[-1]

    yield start_holder
    for process in processes:
        process.kill()
        process.wait()


def read_line(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def never(message: str) -> None:
    raise AssertionError(message)


def test_a_lease_is_given_up_with_its_block(path: Path) -> None:
    for _ in range(2):
        with hold_lease(path, False, never, beat_s=0.05, deadline_s=600.0):
            time.sleep(0.2)
            assert json.loads(path.read_text())["beat"] > 0
        assert not path.exists()


def test_a_holder_that_lives_is_named_at_once(path: Path, start: Start) -> None:
    holder = start()
    assert read_line(holder) == "held"
    with (
        pytest.raises(LockedError, match=rf"process {holder.pid} on \S+ since 20"),
        hold_lease(path, False, never, deadline_s=60.0),
    ):
        pass
    assert json.loads(path.read_text())["holder"].startswith(f"process {holder.pid} "), "taken"


def test_a_holder_that_ends_meanwhile_is_not_waited_for(path: Path) -> None:
    path.write_text("as a holder left it")
    ending = threading.Timer(0.5, path.unlink)
    ending.start()
    began_s = time.monotonic()
    with hold_lease(path, False, never, deadline_s=60.0):
        assert time.monotonic() - began_s < 30.0
    ending.join()


@pytest.mark.parametrize(
    "content",
    [None, "", *(pytest.param(torn, marks=pytest.mark.slow) for torn in ("{}", "half a"))],
)
def test_a_dead_holder_is_waited_for_until_the_deadline(
    content: str | None, path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    holder = start()
    assert read_line(holder) == "held"
    holder.kill()
    holder.wait()
    if content is not None:
        path.write_text(content)
    began_s = time.monotonic()
    with hold_lease(path, False, never, deadline_s=1.0):
        assert time.monotonic() - began_s > 1.0
    name = f"process {holder.pid} on " if content is None else "another process"
    assert f"{path} names {name}" in capsys.readouterr().err


def test_a_lease_of_this_kernel_is_over_where_a_lock_counts(path: Path, start: Start) -> None:
    holder = start()
    assert read_line(holder) == "held"
    holder.kill()
    holder.wait()
    began_s = time.monotonic()
    with hold_lease(path, True, never, deadline_s=60.0):
        assert time.monotonic() - began_s < 30.0


def test_a_lock_says_nothing_of_other_hosts(path: Path, start: Start) -> None:
    holder = start()
    assert read_line(holder) == "held"
    holder.kill()
    holder.wait()
    path.write_text(path.read_text().replace(read_boot_id(), "another kernel"))
    began_s = time.monotonic()
    with hold_lease(path, True, never, deadline_s=1.0):
        assert time.monotonic() - began_s > 1.0


def test_a_stopped_holder_that_goes_on_ends_itself(path: Path, start: Start) -> None:
    holder = start()
    assert read_line(holder) == "held"
    holder.send_signal(signal.SIGSTOP)
    with hold_lease(path, False, never, deadline_s=1.0):
        holder.send_signal(signal.SIGCONT)
        assert holder.wait(60) == 7
        assert read_line(holder).startswith(f"{path} was taken over by process {os.getpid()} on ")
    assert not path.exists()


def test_of_two_that_waited_one_leads(path: Path, start: Start) -> None:
    path.write_text("left behind")
    both = [start(30.0), start(30.0)]
    until_s = time.monotonic() + 60
    while all(process.poll() is None for process in both):
        assert time.monotonic() < until_s, "both lead"
        time.sleep(0.1)
    [leads] = [process for process in both if process.poll() is None]
    assert read_line(leads) == "held"
    [other] = [process for process in both if process is not leads]
    assert f"process {leads.pid} on " in other.communicate()[0]


def test_a_disk_that_fails_costs_beats_and_not_the_lease(path: Path) -> None:
    with hold_lease(path, False, never, beat_s=0.05):
        away = path.rename(path.with_name("away"))
        time.sleep(0.2)
        beat = json.loads(away.read_text())["beat"]
        away.rename(path)
        until_s = time.monotonic() + 30
        while json.loads(path.read_text())["beat"] == beat:
            assert time.monotonic() < until_s, "no more beats"
            time.sleep(0.05)


def test_a_full_disk_leaves_no_lease_that_a_start_would_wait_for(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=64k") as disk:
        (disk / "filler").write_bytes(bytes(64 * 1024))
        lease = hold_lease(disk / "run.lease", True, never)
        with pytest.raises(OSError, match="No space left"), lease:
            pass
        assert not (disk / "run.lease").exists()


def test_a_few_late_beats_cost_no_lease() -> None:
    assert BEAT_S * 10 < DEADLINE_S
