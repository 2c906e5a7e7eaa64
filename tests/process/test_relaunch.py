"""A command whose child is lost starts another one, which finds what the lost one had held."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

CHILD = """
import os, signal, sys, time
from pathlib import Path
from mcore_rl.process import relaunch
from mcore_rl.process.kept_memory import KeptMemory, map_kept

folder, how = Path(sys.argv[1]), sys.argv[2]

def note(text):
    with open(folder / "notes", "a") as file:
        file.write(text + chr(10))

relaunch.STOPPED_S = 2
again = relaunch.run_in_child(2)
memory = KeptMemory()
with map_kept(memory.reserve("rank0", 8192)) as piece:
    note(f"{os.getpid()} {again} {relaunch.read_state()} {bytes(piece[:5])} {memory.find('other')}")
    piece[:5] = b"state"
if not again:
    memory.reserve("other", 4096)
    memory.release("other")
for number in relaunch.SIGNALS:
    signal.signal(number, lambda number, _: note(signal.Signals(number).name))
relaunch.hold_state(b"step 1")
relaunch.hold_state(b"step 2" if again else b"step 1")
if how != "early" and not (how == "restart" and again):
    relaunch.allow_relaunch()
if how == "exit":
    sys.exit(3)
if how == "leave":
    os._exit(1)
if how in ("kill", "early", "restart"):
    os.kill(os.getpid(), signal.SIGKILL)
if how == "session" and not again:
    relaunch.note_session(str(folder / "session"))
    os._exit(1)
note("ready")
while how == "wait":
    time.sleep(0.01)
"""


class Command:
    """A command in a session of its own, and the lines that its children noted."""

    def __init__(self, folder: Path, how: str) -> None:
        self._notes = folder / "notes"
        command = [sys.executable, "-c", CHILD, str(folder), how]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def notes(self) -> list[str]:
        return self._notes.read_text().splitlines() if self._notes.exists() else []

    def wait_for(self, note: str) -> None:
        until_s = time.monotonic() + 30
        while note not in self.notes():
            assert time.monotonic() < until_s, self.notes()
            time.sleep(0.01)

    def end(self) -> tuple[int, str]:
        """Return the exit status, and what was told."""
        _, told = self.process.communicate(timeout=120)
        return self.process.returncode, told

    def list_found(self) -> list[tuple[str, ...]]:
        """Return what each child found: whether it is another one, the state, and memory."""
        return [tuple(note.split(" ", 1)[1:]) for note in self.notes() if note[0].isdigit()]


@contextmanager
def run_waiting_command(folder: Path) -> Iterator[Command]:
    command = Command(folder, "wait")
    try:
        command.wait_for("ready")
        yield command
    finally:
        os.killpg(command.process.pid, signal.SIGKILL)
        command.end()


FIRST = (r"False None b'\x00\x00\x00\x00\x00' None",)


@pytest.mark.parametrize(
    "how, status, died",
    [("kill", 137, "was ended by SIGKILL"), ("leave", 1, "ended with status 1")],
)
def test_a_lost_child_is_followed_by_others_that_find_what_it_held(
    tmp_path: Path, how: str, status: int, died: str
) -> None:
    command = Command(tmp_path, how)
    ended, told = command.end()
    assert ended == status
    assert command.list_found() == [
        FIRST,
        ("True b'step 1' b'state' None",),
        ("True b'step 2' b'state' None",),
    ]
    lines = told.splitlines()
    assert len(lines) == 3 and all(died in line for line in lines)
    assert lines[0].endswith("it starts again (1 of 2 within an hour)")
    assert "run.recovery.restarts=2 within an hour are spent" in lines[2]


def test_an_end_by_exit_is_the_end_of_the_command(tmp_path: Path) -> None:
    command = Command(tmp_path, "exit")
    assert command.end() == (3, "")
    assert command.list_found() == [FIRST]


def test_a_child_that_is_lost_before_it_allows_it_is_not_followed(tmp_path: Path) -> None:
    command = Command(tmp_path, "early")
    status, told = command.end()
    assert status == 137 and "before its first step. The same command continues" in told
    assert command.list_found() == [FIRST]


def test_a_child_that_is_lost_while_it_takes_over_is_followed(tmp_path: Path) -> None:
    command = Command(tmp_path, "restart")
    status, told = command.end()
    assert status == 137 and "run.recovery.restarts=2 within an hour are spent" in told
    assert [found[0] for found in command.list_found()] == [
        "False None b'\\x00\\x00\\x00\\x00\\x00' None",
        "True b'step 1' b'state' None",
        "True b'step 2' b'state' None",
    ]


def test_the_next_child_waits_for_the_end_of_the_session(tmp_path: Path) -> None:
    (tmp_path / "session").mkdir()
    command = Command(tmp_path, "session")
    time.sleep(0.6)
    assert "ready" not in command.notes()
    (tmp_path / "session").rmdir()
    command.wait_for("ready")
    assert command.end()[0] == 0 and len(command.list_found()) == 2


def test_signals_reach_the_child_once(tmp_path: Path) -> None:
    with run_waiting_command(tmp_path) as command:
        command.process.send_signal(signal.SIGUSR1)
        command.wait_for("SIGUSR1")
        os.killpg(command.process.pid, signal.SIGTERM)  # as a scheduler does
        command.wait_for("SIGTERM")
        time.sleep(0.6)
        assert command.notes()[1:] == ["ready", "SIGUSR1", "SIGTERM"]


def test_a_child_that_is_stopped_alone_is_killed_and_followed(tmp_path: Path) -> None:
    with run_waiting_command(tmp_path) as command:
        [child] = psutil.Process(command.process.pid).children()
        child.suspend()
        child.wait(20)
        until_s = time.monotonic() + 20
        while len(command.list_found()) < 2:
            assert time.monotonic() < until_s, command.notes()
            time.sleep(0.01)


def test_the_child_is_killed_with_its_command(tmp_path: Path) -> None:
    with run_waiting_command(tmp_path) as command:
        [child] = psutil.Process(command.process.pid).children()
        command.process.kill()
        child.wait(10)
