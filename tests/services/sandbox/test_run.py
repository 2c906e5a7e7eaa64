"""Programs that mean harm, run for real: what each gets, and that nothing of it is left."""

import os
import re
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mcore_rl.services.sandbox.execution import CodeRequest
from mcore_rl.services.sandbox.service import Limits, Outcome, run_code, run_program

LIMITS = Limits(wall_s=8.0, cpu_s=4, memory_mib=256, processes=6, files_mib=4, output_kib=64)


def run(source: str, stdin: str = "", **changes: Any) -> Outcome:
    return run_program(source, stdin, Limits(**(vars(LIMITS) | changes)))


def test_a_program_reads_its_input_and_is_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    outcome = run(
        "import os\nprint(input() * 2, os.getuid(), 'HF_TOKEN' in os.environ)\nexit(3)", "ab\n"
    )
    assert outcome == Outcome(3, "abab 1000 False\n", "")


def test_an_endless_loop_ends_at_its_limits() -> None:
    began_s = time.monotonic()
    outcome = run("while True: pass", wall_s=1.5)
    assert outcome.killed == "no end within 1.5 s" and time.monotonic() - began_s < 30
    assert run("while True: pass", wall_s=60.0, cpu_s=1).status == 128 + signal.SIGXCPU
    assert run("import time; time.sleep(60)", wall_s=1.0).killed


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("bytearray(1 << 30)", "MemoryError"),
        ("import socket; socket.create_connection(('1.1.1.1', 80), 2)", "Network is unreachable"),
        (
            "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
            "Network is unreachable",
        ),
        ("open('{here}/written', 'w')", "No such file or directory|Permission denied|Read-only"),
        ("open('/usr/written', 'w')", "Read-only file system"),
        ("open('/written', 'w')", "Read-only file system"),
        ("import os; os.listdir(os.path.expanduser('{home}/.ssh'))", "No such file or directory"),
        ("open('/proc/1/environ')", "No such file or directory"),
        ("open('/etc/shadow')", "No such file or directory"),
        (
            "for i in range(9): open(f'/box/{i}', 'wb').write(bytes(1 << 20))",
            "No space left on device",
        ),
        ("open('/box/a', 'wb').write(bytes(8 << 20))", "No space left on device|File too large"),
        ("import os; os.kill({pid}, 9)", "No such process"),
        ("import os; os.setuid(0)", "Operation not permitted"),
        (
            "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            "assert libc.unshare(0x10000000) < 0\nraise OSError(os.strerror(ctypes.get_errno()))",
            "Operation not permitted",
        ),
    ],
)
def test_what_is_out_of_bounds_fails(source: str, error: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {
            "port": server.getsockname()[1],
            "here": tmp_path,
            "home": Path.home(),
            "pid": os.getpid(),
        }
        for name, value in names.items():
            source = source.replace(f"{{{name}}}", str(value))
        outcome = run(source)
    assert outcome.status == 1
    assert re.search(error, outcome.stderr)
    assert list(tmp_path.iterdir()) == []


def test_a_flood_of_output_is_cut_off() -> None:
    outcome = run("import sys\nwhile True: sys.stderr.write('x' * 4096)")
    assert outcome.killed == "more than 64 KiB of output" and len(outcome.stderr) == 64 << 10


def test_a_fork_bomb_is_bounded_and_daemons_end_with_the_program() -> None:
    mark = f"sandbox-test-{os.getpid()}"
    bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
    began_s = time.monotonic()
    run(bomb, wall_s=2.0, cpu_s=1)
    assert time.monotonic() - began_s < 30
    daemon = (
        "import os, sys, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n"
        "  sleep = 'import time; time.sleep(60)'\n"
        f"  os.execv(sys.executable, [sys.executable, '-c', sleep, '{mark}'])\n"
        " os._exit(0)\ntime.sleep(1)\nprint('done')"
    )
    seen = run(daemon)
    assert (seen.status, seen.stdout) == (0, "done\n")
    left = [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]
    assert not left
    count = "import os, time\nn = 0\nwhile True:\n try:\n  if os.fork() == 0: time.sleep(60)\n"
    count += "  n += 1\n except OSError: break\nprint(n)"
    assert run(count).stdout == f"{LIMITS.processes - 1}\n"


def test_a_request_in_another_language() -> None:
    result = run_code(CodeRequest("read a; echo $a", "bash", "b", files={"c": b"d"}, fetch=("c",)))
    assert result.ran is not None and result.ran.stdout == b"b\n"
    assert result.files == {"c": b"d"}
    with pytest.raises(ValueError, match="this machine has no kobol"):
        run_code(CodeRequest("", "kobol"))


def test_folders_are_removed() -> None:
    before = set(Path(tempfile.gettempdir()).glob("sandbox_*"))
    run("open('/box/a', 'w').write('a')")
    run("while True: pass", wall_s=1.0)
    assert not set(Path(tempfile.gettempdir()).glob("sandbox_*")) - before


def test_text_that_is_no_utf8_reaches_the_program_with_escapes() -> None:
    outcome = run("print(input(), len('\ud83d'))", "a\ud83d\n")
    assert outcome == Outcome(0, "a\\ud83d 1\n", "")
