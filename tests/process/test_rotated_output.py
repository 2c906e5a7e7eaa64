"""Logs of processes are rotated while they write, and no line is lost or written twice."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from mcore_rl.process.log_files import ROTATE_BYTES, find_segments, rotate_logs

WRITER = """
import os, subprocess, sys, time
from mcore_rl.process.log_files import follow_output, rotate_output

who, num_lines = sys.argv[1], int(sys.argv[2])
if who == "parent":
    rotate_output(look_every_s=0.002)
if who == "follower":
    follow_output(look_every_s=0.002)
children = []
if who == "parent":
    command = [sys.executable, "-c", sys.argv[3]]
    children = [
        subprocess.Popen([*command, child, sys.argv[2], sys.argv[3]])
        for child in ("follower", "other")
    ]
for number in range(num_lines):
    out = (sys.stdout, sys.stderr)[number % 2]
    out.write(f"{who} {number}\\n")  # whole lines: the three write to one file
    out.flush()
    time.sleep(0.0005)
assert all(child.wait() == 0 for child in children)
time.sleep(0.1)
sys.stdout.write(f"{who} ends {os.path.basename(os.readlink('/proc/self/fd/1'))}\\n")
"""
"""Writes lines. The parent rotates its log; of its children one follows, the other does not."""
NUM_LINES = 1500


def run_writer(log: Path, who: str, num_lines: int = NUM_LINES) -> list[str]:
    """Return all lines in the segments and the log, in order."""
    with log.open("ab") as file:
        subprocess.run(
            [sys.executable, "-c", WRITER, who, str(num_lines), WRITER],
            stdout=file,
            stderr=subprocess.STDOUT,
            check=True,
        )
    return [line for part in (*find_segments(log), log) for line in part.read_text().splitlines()]


def test_no_line_is_lost_while_a_log_is_rotated(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    with rotate_logs(2000):
        lines = run_writer(log, "parent")
    assert ROTATE_BYTES not in os.environ
    ends = dict(line.split(" ends ") for line in lines if " ends " in line)
    assert len(find_segments(log)) > 4
    assert ends["parent"] == "rank.log"
    assert "rank.0" in ends["other"], "it does not follow"
    numbered = Counter(line for line in lines if " ends " not in line)
    assert numbered == {
        f"{who} {number}": 1
        for who in ("parent", "follower", "other")
        for number in range(NUM_LINES)
    }
    of_parent = [line for line in lines if line.startswith("parent") and " ends " not in line]
    assert of_parent == [f"parent {number}" for number in range(NUM_LINES)]
    newest = [part.name for part in find_segments(log)][-3:]
    assert ends["follower"] in (*newest, "rank.log"), "it ends while the parent still rotates"


def test_nothing_is_rotated_unless_asked_for(tmp_path: Path) -> None:
    for rotate_bytes in (None, 0):
        log = tmp_path / f"{rotate_bytes}.log"
        if rotate_bytes is None:
            run_writer(log, "parent", 20)
        else:
            with rotate_logs(rotate_bytes):
                run_writer(log, "parent", 20)
        assert find_segments(log) == []
