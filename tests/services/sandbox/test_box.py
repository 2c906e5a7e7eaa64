"""Steps of a box end at their limits, and their records say how."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from mcore_rl.services.sandbox.box import FilesRefusedError, ProgramBox, Streams
from mcore_rl.services.sandbox.limits import (
    MIB,
    BoxStep,
    Limits,
    RunRecord,
    RunVerdict,
    SandboxError,
)
from mcore_rl.services.sandbox.worker import Worker
from tests.support.sandboxes import PROGRAM, make_worker
from tests.support.sandboxes import run as run_program

LIMITS = Limits(wall_s=20.0, cpu_s=10, memory_mib=128, output_kib=64)


@pytest.fixture(scope="module", params=[True, False], ids=["cgroups", "rlimits"])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    made = make_worker(request.param)
    yield made
    made.close()


def run(worker: Worker, source: str, **changes: object) -> RunRecord:
    return run_program(worker, source, limits=replace(LIMITS, **changes))


@pytest.mark.parametrize(
    ("source", "changes", "verdict", "killed"),
    [
        ("print(1)", {}, RunVerdict.OK, ""),
        ("exit(3)", {}, RunVerdict.WRONG, ""),
        ("import os; os.kill(os.getpid(), 11)", {}, RunVerdict.WRONG, ""),
        ("while True: pass", {"wall_s": 1.0}, RunVerdict.TIMEOUT, "no end within 1 s"),
        ("import time; time.sleep(60)", {"wall_s": 0.5}, RunVerdict.TIMEOUT, "no end within 0.5 s"),
        ("while True: pass", {"cpu_s": 1}, RunVerdict.TIMEOUT, ""),
        (
            "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
            {"cpu_s": 1},
            RunVerdict.TIMEOUT,
            "",
        ),
        ("while True: print('x' * 999)", {}, RunVerdict.KILLED, "more than 64 KiB of output"),
    ],
)
def test_a_record_says_how_a_program_ended(
    worker: Worker, source: str, changes: dict[str, object], verdict: RunVerdict, killed: str
) -> None:
    record = run(worker, source, **changes)
    assert (record.verdict, record.killed) == (verdict, killed)


def test_memory_of_all_processes_together_is_bounded(worker: Worker) -> None:
    source = (
        "import os\nfor _ in range(3):\n if os.fork() == 0:\n"
        "  held = b'x' * (90 << 20); import time; time.sleep(60)\n"
        "held = b'x' * (90 << 20); os.wait()"
    )
    record = run(worker, source, wall_s=2.0)
    if worker.cgroup is None:
        assert record.verdict == RunVerdict.TIMEOUT
    else:
        assert record.verdict == RunVerdict.MEMORY
        assert record.killed == "more than 128 MiB of memory"
        assert record.memory_bytes <= 128 * MIB


def test_use_is_accounted(worker: Worker) -> None:
    source = (
        "import time\nheld = b'x' * (60 << 20)\nend = time.process_time() + 0.5\n"
        "while time.process_time() < end: pass\ntime.sleep(0.5)"
    )
    record = run(worker, source)
    assert record.verdict == RunVerdict.OK
    assert 0.4 < record.cpu_s < 3
    assert record.wall_s >= 1.0
    assert 60 * MIB < record.memory_bytes < 128 * MIB
    assert record.limits == LIMITS


def test_use_of_children_is_accounted(worker: Worker) -> None:
    source = (
        "import os, time\nif os.fork() == 0:\n end = time.process_time() + 0.5\n"
        " while time.process_time() < end: pass\n os._exit(0)\nos._exit(0)"
    )
    assert run(worker, source).cpu_s < 0.4  # the orphan ends with the program
    assert run(worker, source.replace("os._exit(0)", "", 1).replace("\nos._e", "\nos.wait();os._e"))


def test_steps_follow_one_another_in_one_box(worker: Worker) -> None:
    with ProgramBox(worker, LIMITS) as box:
        box.put({"a/b": b"1"})
        first = box.run(BoxStep(("/bin/sh", "-c", "cat a/b; echo 2 > c; sleep 60 & echo done")))
        assert (first.verdict, first.stdout) == (RunVerdict.OK, b"1done\n")
        assert box.run(BoxStep(("/bin/cat", "c"))).stdout == b"2\n"
        assert box.get(None) == {"a/b": b"1", "c": b"2\n"}
        assert box.get(["c", "none", "../etc"]) == {"c": b"2\n"}


def test_files_that_do_not_fit_are_refused_and_the_box_goes_on(worker: Worker) -> None:
    with ProgramBox(worker, replace(LIMITS, files_mib=1)) as box:
        with pytest.raises(FilesRefusedError, match="No space left"):
            box.put({"large": bytes(2 * MIB)})
        box.put({"large": b""})
        box.run(BoxStep(("/bin/sh", "-c", "head -c 500000 /dev/zero > x")))
        with pytest.raises(FilesRefusedError, match="more than 1000 bytes"):
            box.get(None, 1000)
        assert box.run(BoxStep(("/bin/echo", "on"))).stdout == b"on\n"


def test_many_files_are_refused(worker: Worker) -> None:
    with ProgramBox(worker, replace(LIMITS, num_files=10)) as box, pytest.raises(FilesRefusedError):
        box.put({f"f{i}": b"" for i in range(20)})


def test_a_deadline_holds_when_the_box_itself_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process keeps the deadline; if it is stopped, its caller does."""
    monkeypatch.setattr("mcore_rl.services.sandbox.box.GRACE_S", 0.5)
    lone = make_worker(use_cgroups=False)
    box = ProgramBox(lone, LIMITS)
    box.put({"program.py": b"import time; time.sleep(60)"})
    (first,) = psutil.Process(lone.pid).children()
    first.suspend()
    began_s = time.monotonic()
    record = box.run(BoxStep(program=PROGRAM, limits=replace(LIMITS, wall_s=0.5)))
    assert record.verdict == RunVerdict.TIMEOUT
    assert time.monotonic() - began_s < 20
    assert lone.is_retired
    box.close()
    lone.close()
    _, alive = psutil.wait_procs([first], timeout=30)
    assert not alive


def test_a_box_that_was_killed_is_an_error_of_the_sandbox() -> None:
    lone = make_worker(use_cgroups=False)
    box = ProgramBox(lone, LIMITS)
    box.put({})
    (first,) = psutil.Process(lone.pid).children()
    first.kill()
    with pytest.raises(SandboxError, match="ended"):
        box.run(BoxStep(("/bin/true",)))
    lone.close()
    box._call.close()


def test_streams_are_read_up_to_the_limit() -> None:
    streams = Streams(10)
    writer = streams.open()
    os.write(writer, b"x" * 100)
    streams.read(streams.open_fds)
    assert streams.is_over
    assert streams.take() == [b"x" * 10]
    os.close(writer)
    streams.read(streams.open_fds)
    assert streams.open_fds == []
    streams.close()
