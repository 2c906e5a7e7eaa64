"""Cells share names, print their last value, and their errors end no notebook."""

import json
import os
import subprocess
import sys

import pytest

from mcore_rl.services.sandbox import notebook
from mcore_rl.services.sandbox.notebook import run_cell


@pytest.mark.parametrize(
    ("source", "out", "error"),
    [
        ("x = 2", "", ""),
        ("1 + 1", "2\n", ""),
        ("None", "", ""),
        ("'a'", "'a'\n", ""),
        ("print(3)\n4", "3\n4\n", ""),
        ("for i in range(2): print(i)", "0\n1\n", ""),
        ("1 / 0", "", "ZeroDivisionError"),
        ("x = (", "", "SyntaxError"),
        ("raise SystemExit(3)", "", "SystemExit"),
        ("", "", ""),
    ],
)
def test_a_cell(source: str, out: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cell(source, "<cell 1>", {}) == error
    seen = capsys.readouterr()
    assert seen.out == out
    assert bool(seen.err) == bool(error)
    assert "notebook.py" not in seen.err


def test_names_are_there_in_the_next_cell(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    run_cell("import math\ndef f(x): return math.floor(x)", "<cell 1>", names)
    run_cell("f(2.5)", "<cell 2>", names)
    assert capsys.readouterr().out == "2\n"


def test_cells_are_read_and_answered_over_descriptors() -> None:
    cells, ours = os.pipe()
    ours_too, answers = os.pipe()
    start = f"os.dup2({cells}, 13); os.dup2({answers}, 14); os.dup2(13, 3); os.dup2(14, 4)"
    source = (
        f"import os, runpy; {start}; runpy.run_path({notebook.__file__!r}, run_name='__main__')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source], pass_fds=[cells, answers], stdout=subprocess.PIPE
    )
    os.write(ours, b"x = 4\0x + 1\0x /")
    os.write(ours, b" 0\0")
    os.close(ours)
    os.close(cells)
    os.close(answers)
    assert process.communicate(timeout=240)[0] == b"5\n"
    with os.fdopen(ours_too, "rb") as stream:
        found = [json.loads(answer) for answer in stream.read().split(b"\0")[:-1]]
    assert [answer["error"] for answer in found] == ["", "", "ZeroDivisionError"]
