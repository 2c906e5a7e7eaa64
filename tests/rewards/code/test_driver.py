"""The driver, outside of a sandbox: what it reports of programs, and what they find of it."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from mcore_rl.rewards.code.driver import READY
from mcore_rl.rewards.code.execution import driver_text


def drive(programs: list[str], tests: list[dict[str, Any]], **setup: Any) -> list[dict[str, Any]]:
    """Return the driver's report of each test."""
    frames = [{"programs": programs, "test_s": 20.0, "cap_bytes": 1000} | setup, *tests]
    texts = [json.dumps(frame) for frame in frames]
    done = subprocess.run(
        [sys.executable, "-I", "-c", driver_text()],
        input="".join(f"{len(text):08x}{text}" for text in texts),
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ},
    )
    first, *lines = done.stdout.splitlines()
    assert first == READY, done
    return [json.loads(line) for line in lines]


def script(stdin: str = "", program: int = 0) -> dict[str, Any]:
    return {"program": program, "stdin": stdin}


def test_each_test_has_its_own_input_and_process() -> None:
    program = (
        "import os\nn = int(input())\nprint(n * 2, 'seen' in os.environ)\nos.environ['seen'] = '1'"
    )
    reports = drive([program], [script("1"), script("2\n")])
    assert [report["out"] for report in reports] == ["2 False\n", "4 False\n"]


def test_input_longer_than_a_pipe_holds_is_read() -> None:
    report = drive(["import sys\nprint(len(sys.stdin.read()))"], [script("x" * 300_000)])[0]
    assert report["out"] == "300000\n"


def test_a_test_without_a_place_for_its_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of the program, which has not begun."""
    monkeypatch.setenv("TMPDIR", "/nowhere")
    [report] = drive(["print(1)"], [script(), script()])
    assert "no file for standard input" in report["refused"]


@pytest.mark.parametrize(
    ("program", "status", "out"),
    [
        ("print(1)\nraise SystemExit(3)", 3, "1\n"),
        ("import atexit\natexit.register(print, 'end')", 0, "end\n"),
        ("import threading as t\nt.Thread(target=print, args=('end',)).start()", 0, "end\n"),
        ("import os\nos.kill(os.getpid(), 9)", 128 + 9, ""),
        ("def f(:", 1, ""),
        ("if __name__ == '__main__': print('main')", 0, "main\n"),
    ],
)
def test_programs_end_as_they_do_alone(program: str, status: int, out: str) -> None:
    report = drive([program], [script()])[0]
    assert (report["status"], report["out"], report["killed"]) == (status, out, "")


def test_an_error_is_told_without_the_driver() -> None:
    error = drive(["def f():\n    return 1 / 0\nf()"], [script()])[0]["error"]
    assert "line 2, in f" in error and "ZeroDivisionError" in error
    assert "serve" not in error and "exec(" not in error


def test_a_function_or_a_method_of_solution_gives_its_result() -> None:
    plain = "def f(a, b):\n    print('noise')\n    return (a, b)"
    method = "class Solution:\n    def f(self, a, b):\n        return [a, b]"
    call = {"function": "f", "arguments": ["list", [1, "x"]]}
    reports = drive([plain, method], [call | {"program": 0}, call | {"program": 1}])
    results = [json.loads(report["result"]) for report in reports]
    assert results == [["tuple", [1, "x"]], ["list", [1, "x"]]]


def test_limits_end_a_test_and_not_the_next() -> None:
    slow = "import time\nif input() == 'wait': time.sleep(60)\nprint('done')"
    reports = drive([slow], [script("wait"), script("go")], test_s=2.0)
    assert reports[0]["killed"] == "no end within 2 s" and reports[1]["out"] == "done\n"
    flood = drive(["while True: print('x' * 999)"], [script()])[0]
    assert flood["killed"] == "more than 1000 bytes of output"


def test_a_process_left_behind_does_not_hold_up_the_next_test() -> None:
    program = "import os, time\nif os.fork() == 0:\n    time.sleep(60)\nprint('done')"
    reports = drive([program], [script(), script()], test_s=20.0)
    assert [report["out"] for report in reports] == ["done\n", "done\n"]


def test_a_program_does_not_find_the_tests_to_come() -> None:
    """Neither in an open file, nor in any object of its process."""
    program = (
        "import gc, os\n"
        "objects = [o for o in gc.get_objects() if type(o) in (dict, list)]\n"
        "found = any('SECRET' in str(o)[:9999] for o in objects)\n"
        "for fd in range(3, 64):\n"
        "    try:\n"
        "        found = found or b'SEC' + b'RET' in os.pread(fd, 9999, 0)\n"
        "    except OSError: pass\n"
        "print(found)"
    ).replace("'SECRET'", "'SEC' + 'RET'")
    reports = drive([program], [script(), script("SECRET")])
    assert reports[0]["out"] == "False\n"
