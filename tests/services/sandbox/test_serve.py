"""The command's server says what it found, answers, and ends without a trace."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from mcore_rl.services.sandbox.server import choose_key, serve
from mcore_rl.services.sandbox.service import SandboxOptions

KEY = "0123456789abcdef"


def test_it_serves_until_it_is_stopped() -> None:
    command = [sys.executable, "-m", "mcore_rl.cli", "sandbox", "serve", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--workers", "1"],
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        found = re.search(r"http://\S+/run_code", process.stderr.readline())
        assert found
        body = json.dumps({"code": "print(6 * 7)", "language": "python"}).encode()
        with urllib.request.urlopen(found[0], body, timeout=60) as response:
            assert json.load(response)["run_result"]["stdout"] == "42\n"
        wardens = psutil.Process(process.pid).children()
        assert wardens
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        said = process.stderr.read()
    assert "python " in said
    _, alive = psutil.wait_procs(wardens, timeout=30)
    assert not alive


def test_once_says_what_it_found_and_stops(capsys: pytest.CaptureFixture[str]) -> None:
    serve(SandboxOptions(workers=1), "127.0.0.1", 0, None, 429, once=True)
    said = capsys.readouterr().err
    assert re.search(r"sandbox at http://127.0.0.1:\d+/run_code, 1 workers", said)
    assert "bash" in said
    assert "cgroups" in said


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port={port}"):
            serve(SandboxOptions(workers=1), "127.0.0.1", port, None, 429)


def test_a_key_is_needed_where_others_reach_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    assert choose_key(path, "0.0.0.0") == KEY
    assert choose_key(None, "127.0.0.1") == ""
    with pytest.raises(ValueError, match=r"--host=0.0.0.0"):
        choose_key(None, "0.0.0.0")
