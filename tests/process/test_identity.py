"""A process has the command line and the variables that it was given, and shows these."""

import json
import subprocess
import sys

from mcore_rl.process import identity

SCRIPT = f"""
import ctypes, json, os, sys
from pathlib import Path
from {identity.__name__} import take_identity
environment = json.loads(sys.argv[1])
take_identity(["-m", "another"], environment)
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
shown = Path("/proc/self/environ").read_bytes().rstrip(b"\\0").split(b"\\0")
print(json.dumps([sys.argv, dict(os.environ) == environment, (getenv(b"COLOR") or b"").decode(),
                  getenv(b"GONE") is None, [word.decode() for word in shown]]))
"""


def become(environment: dict[str, str], before: dict[str, str]) -> list[object]:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(environment)],
        env=before,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ended.stdout)


def test_it_has_and_shows_another_identity() -> None:
    before = {"GONE": "x", "SAME": "y", "ROOM": "z" * 100}
    argv, same, color, gone, shown = become({"SAME": "y", "COLOR": "green"}, before)
    assert argv == ["-m", "another"] and same and color == "green" and gone
    assert shown == ["COLOR=green", "SAME=y"]


def test_what_does_not_fit_is_not_shown() -> None:
    _, same, color, _, shown = become({"SAME": "y", "COLOR": "green" * 100}, {"SAME": "y"})
    assert same and color == "green" * 100
    assert shown == ["SAME=y"]
