"""Runs a command in the repository without its output, which is shown if the command fails."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 1800


def output_of(command: Sequence[str], **environment: str) -> str:
    """Return what a command prints; exit with the end of it and of its errors if it fails."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        text = (done.stdout + done.stderr)[-4000:]
        sys.exit(f"{' '.join(command)} exited {done.returncode}:\n{text}")
    return done.stdout
