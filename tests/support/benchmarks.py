"""Runs a script of benchmarks/ in a process of its own."""

import json
import os
import subprocess
import sys
from typing import Any

from tests.support.policy import ROOT


def figures_of(script: str, *options: str, timeout_s: float) -> dict[str, Any]:
    """Return the last line of `benchmarks/<script>`, which is one JSON object."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
