"""A process has the variables, streams and settings that it was given, and shows the variables."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from mcore_rl.cpu import fork_server as identity

SCRIPT = f"""
import ctypes, json, os, signal, sys
from pathlib import Path
from {identity.__name__} import ForkRequest, become
environment = json.loads(sys.argv[1])
out = os.open("out", os.O_WRONLY | os.O_CREAT)
streams = [os.open(os.devnull, os.O_RDONLY), out, os.dup(2), os.dup(0)]
signals = [int(signal.SIGUSR1)]
become(ForkRequest(["script", "--a"], environment, sys.argv[2], False, signals, "700", streams))
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
shown = Path("/proc/self/environ").read_bytes().rstrip(b"\\0").split(b"\\0")
print(json.dumps({{
    "argv": sys.argv,
    "same": dict(os.environ) == environment,
    "color": (getenv(b"COLOR") or b"").decode(),
    "gone": getenv(b"GONE") is None,
    "shown": [word.decode() for word in shown],
    "cwd": os.getcwd(),
    "path": os.getcwd() in sys.path,
    "blocked": [number.name for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "oom": Path("/proc/self/oom_score_adj").read_text().strip(),
    "left": len(streams),
}}), flush=True)
"""


def made(folder: Path, environment: dict[str, str], before: dict[str, str]) -> dict[str, Any]:
    (folder / "cwd").mkdir()
    subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(environment), str(folder / "cwd")],
        env={"PYTHONPATH": ":".join(sys.path), **before},
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return json.loads((folder / "out").read_text())


def test_it_has_and_shows_another_identity(tmp_path: Path) -> None:
    before = {"GONE": "x", "SAME": "y"}
    is_now = made(tmp_path, {"SAME": "y", "COLOR": "green"}, before)
    assert is_now == {
        "argv": ["script", "--a"],
        "same": True,
        "color": "green",
        "gone": True,
        "shown": ["COLOR=green", "SAME=y"],
        "cwd": str(tmp_path / "cwd"),
        "path": False,
        "blocked": ["SIGUSR1"],
        "oom": "700",
        "left": 1,
    }


def test_what_does_not_fit_is_not_shown(tmp_path: Path) -> None:
    is_now = made(tmp_path, {"SAME": "y", "COLOR": "green" * 9999}, {"SAME": "y"})
    assert is_now["same"] and is_now["color"] == "green" * 9999
    assert is_now["shown"] == ["SAME=y"]
