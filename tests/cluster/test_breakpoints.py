"""breakpoint() in a controller is answered on its terminal, or waits for a debugger for a while."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.cluster import breakpoints
from tests.support.debuggers import ray_debug, wait_for_match

pytestmark = pytest.mark.e2e
CONTROLLER = (sys.executable, "-m", "tests.support.stopping_controller")


def start(wait_s: float, output: Path, mode: str = "legacy") -> subprocess.Popen[bytes]:
    """Start a controller as a submitted run starts it: without a terminal."""
    with output.open("wb") as file:
        return subprocess.Popen(
            [*CONTROLLER, str(wait_s)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "RAY_DEBUG": mode},
        )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["legacy", "1"])
def test_a_controller_that_nobody_comes_to_goes_on(mode: str, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert start(1.5, output, mode).wait(60) == 0, output.read_text()
    text = output.read_text()
    assert text.count("mcore-rl: breakpoint()") == 1 and "answer 0" in text, text
    assert re.search(r"no debugger came to .*controller.py:\d+ within 1.5 s .*call_timeout_s", text)


@pytest.mark.slow
def test_a_client_that_leaves_lets_the_controller_go_on(tmp_path: Path) -> None:
    output = tmp_path / "out"
    controller = start(50, output)
    first = wait_for_match(r"mcore-rl: breakpoint\(\) .*\n", output.read_text, 40)[0]
    port = re.search(r"nc 127\.0\.0\.1 (\d+)", first)
    assert port is not None
    subprocess.run(["bash", "-c", f": > /dev/tcp/127.0.0.1/{port[1]}"], check=True)
    after = re.escape(first) + r"(?s:.*)(mcore-rl: breakpoint\(\) .*)\n"
    second = wait_for_match(after, output.read_text, 10)[1]
    ray_debug(second, "answer = answer + 42", "continue")
    assert controller.wait(30) == 0
    assert "answer 42" in output.read_text()


def test_a_terminal_gets_pdb() -> None:
    ours, theirs = pty.openpty()
    command = ["setsid", "--ctty", "--wait", *CONTROLLER, "50"]
    controller = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    told = b""
    for typed in (b"answer = 41\n", b"continue\n", b"answer += 1\n", b"continue\n"):
        while not told.endswith(b"(Pdb) "):
            told += os.read(ours, 4096)
        os.write(ours, typed)
        told += b"typed "
    assert controller.wait(30) == 0
    while b"answer 42" not in told:
        told += os.read(ours, 4096)
    os.close(ours)


@pytest.mark.slow
def test_a_process_that_no_debugger_finds_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "breakpoint()"],
        env={**os.environ, "PYTHONBREAKPOINT": breakpoints._HOOK},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert re.search(r"RuntimeError: breakpoint\(\) at <string>:1: .*run.debug=true", done.stderr)
