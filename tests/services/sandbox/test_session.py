"""A notebook and a shell keep their state, and end at their limits without a trace."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from mcore_rl.services.sandbox.languages import readable_paths
from mcore_rl.services.sandbox.limits import Limits, SandboxError
from mcore_rl.services.sandbox.session import NOTEBOOK, BoxSession, CallResult
from mcore_rl.services.sandbox.worker import Worker
from tests.support.sandboxes import descendants, wait_until

LIMITS = Limits(wall_s=600, cpu_s=600, memory_mib=256, output_kib=16, processes=16)
CALL_S = 60.0


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker([*readable_paths({}), NOTEBOOK])
    yield made
    made.close()


def outputs(session: BoxSession, *sources: str) -> list[bytes]:
    return [session.call(source, CALL_S).stdout for source in sources]


def test_a_notebook_keeps_names_files_and_modules(worker: Worker) -> None:
    session = BoxSession(worker, "python", LIMITS, {"data/a.txt": b"7"})
    assert outputs(session, "x = int(open('data/a.txt').read())", "x * 6") == [b"", b"42\n"]
    assert outputs(session, "import helper") == [b""]
    session.put({"helper.py": b"y = 9"})
    assert outputs(session, "import helper", "helper.y") == [b"", b"9\n"]
    session.close()


def test_a_shell_keeps_its_folder_names_and_functions(worker: Worker) -> None:
    session = BoxSession(worker, "bash", LIMITS)
    assert outputs(session, "mkdir d; cd d; X=4", "pwd; echo $X", "f() { echo in $1; }", "f a") == [
        b"",
        b"/box/d\n4\n",
        b"",
        b"in a\n",
    ]
    assert session.call("false", CALL_S).status == 1
    assert session.call("cat", CALL_S).status == 0  # its input is empty
    session.close()


def test_a_snapshot_begins_another_session(worker: Worker) -> None:
    first = BoxSession(worker, "bash", LIMITS)
    first.call("mkdir d; echo 1 > d/a; ln -s /usr/bin/env b", CALL_S)
    files = first.get()
    first.close()
    assert files == {"d/a": b"1\n"}
    second = BoxSession(worker, "python", LIMITS, files)
    assert outputs(second, "open('d/a').read()") == [b"'1\\n'\n"]
    second.close()


@pytest.mark.parametrize(
    ("kind", "source", "after", "wanted"),
    [
        ("python", "x = 1\nwhile True: pass", "x", b"1\n"),
        ("python", "import time; time.sleep(300)", "2", b"2\n"),
        ("bash", "sleep 300", "echo on", b"on\n"),
    ],
)
def test_a_call_is_interrupted_at_its_deadline_and_the_session_goes_on(
    worker: Worker, kind: str, source: str, after: str, wanted: bytes
) -> None:
    session = BoxSession(worker, kind, LIMITS)
    session.call("1", CALL_S)
    late = session.call(source, 1.0)
    assert (late.error, late.is_alive) == ("no end within 1 s", True)
    assert outputs(session, after) == [wanted]
    session.close()


DEAF = "import signal\nsignal.signal(2, signal.SIG_IGN)\nwhile True: pass"


@pytest.mark.parametrize(
    ("kind", "source", "error"),
    [
        ("python", DEAF, "no end within 1 s"),
        pytest.param(
            *("bash", "trap '' INT; while :; do :; done", "no end within 1 s"),
            marks=pytest.mark.slow,
        ),
        ("bash", "yes", "more than 16 KiB of output"),
        ("python", "import os; os._exit(5)", "the session ended with status 5"),
        ("bash", "exit 5", "the session ended with status 5"),
    ],
)
def test_a_session_ends_with_its_processes(
    worker: Worker, kind: str, source: str, error: str
) -> None:
    session = BoxSession(worker, kind, LIMITS)
    is_endless = "within 1 s" in error
    last = session.call(source, 1.0 if is_endless else 30.0)
    assert (last.error, last.is_alive) == (error, False)
    assert len(last.stdout) <= 16 << 10
    assert session.record is not None
    with pytest.raises(SandboxError, match="has ended"):
        session.call("1", CALL_S)
    session.close()
    wait_until(lambda: not descendants(worker.pid), "all processes had ended")


def test_memory_of_a_session_is_bounded(worker: Worker) -> None:
    session = BoxSession(worker, "python", replace(LIMITS, memory_mib=64))
    result = session.call("held = [b'x' * (1 << 20) for _ in range(500)]", CALL_S)
    assert result.error in ("MemoryError", "more than 64 MiB of memory")
    session.close()


def test_a_program_may_forge_only_its_own_answer(worker: Worker) -> None:
    session = BoxSession(worker, "python", LIMITS)
    forged = session.call("import os; os.write(4, b'no json\\0')", CALL_S)
    assert isinstance(forged, CallResult)
    assert forged.error == "an answer that is none"
    session.close()


def test_wrong_input_is_named(worker: Worker) -> None:
    with pytest.raises(ValueError, match="kind='perl'"):
        BoxSession(worker, "perl", LIMITS)
    with pytest.raises(ValueError, match=r"\.\./x"):
        BoxSession(worker, "bash", LIMITS, {"../x": b""})
    session = BoxSession(worker, "python", LIMITS)
    with pytest.raises(ValueError, match="zero byte"):
        session.call("a\0b", CALL_S)
    session.close()
