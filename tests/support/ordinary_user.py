"""Starts programs as a user without any right, and finds a Python that such a user may start."""

import os
import subprocess
import sys
from functools import cache

from tests.support.policy import ROOT

NOBODY = 65534
DEADLINE_S = 300.0


@cache
def open_python() -> str:
    """Return a Python that every user may start with this repository; empty if there is none."""
    check = (
        f"import sys; open({str(ROOT / 'pyproject.toml')!r}); sys.exit(sys.version_info < (3, 11))"
    )
    for program in (sys.executable, "/usr/bin/python3", "/usr/bin/python3.11"):
        if os.path.exists(program) and as_nobody([program, "-c", check]).returncode == 0:
            return program
    return ""


def as_nobody(command: list[str]) -> "subprocess.CompletedProcess[str]":
    user = (f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs")
    return subprocess.run(
        ["setpriv", *user, "env", *command],  # setpriv itself still has root's rights to read
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
