"""A process outlives its output: it says once what cannot be written, and counts what is lost."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.small_disks import call_with_full_disk

PRINT = """
import sys
from mcore_rl.process.log_files import keep_output_lasting

keep_output_lasting()
for number in range(3):
    print("line", number, flush=True)
    print("error", number, file=sys.stderr)
"""
RECOVER = """
import json, os, sys
from mcore_rl.process.log_files import keep_output_lasting

[folder] = json.loads(sys.argv[1])
answer = os.dup(1)
log = os.open(folder + "/own.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(log, 1)
keep_output_lasting()
print("x" * 9999, flush=True)
os.unlink(folder + "/filler")
print("after", flush=True)
os.write(answer, json.dumps(open(folder + "/own.log").read()).encode())
"""


def run(stdout: int, stderr: int) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", PRINT], stdout=stdout, stderr=stderr, text=True, check=False
    )


def test_a_full_output_is_told_once_on_the_other_one() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    done = run(full, subprocess.PIPE)
    assert done.returncode == 0
    first, *errors = done.stderr.splitlines()
    assert first.startswith("its output is lost: cannot write /dev/full: no space left")
    assert errors == ["error 0", "error 1", "error 2"]
    done = run(subprocess.PIPE, full)
    assert done.returncode == 0
    assert done.stdout.count("no space left on device") == 1
    assert [line for line in done.stdout.splitlines() if line.startswith("line")] == [
        "line 0",
        "line 1",
        "line 2",
    ]
    assert run(full, full).returncode == 0
    os.close(full)


def test_a_reader_that_left_ends_no_process() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = run(writing, subprocess.PIPE)
    os.close(writing)
    assert done.returncode == 0
    assert done.stderr.count("Broken pipe") == 1 and done.stderr.endswith("error 2\n")


def test_the_log_tells_how_much_is_missing_once_there_is_space_again(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    kept = call_with_full_disk(RECOVER, folder, [str(folder)])
    assert kept == "[10000 bytes of this output are lost]\nafter\n"
