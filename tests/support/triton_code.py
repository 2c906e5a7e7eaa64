"""Runs code that has Triton, in a process of its own: elsewhere a stand-in has its name."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

_OWN = Path(sys.prefix) / "triton"
"""Where `make test` puts it."""
_HAS_TRITON = _OWN.exists() or find_spec("triton") is not None

needs_triton = pytest.mark.skipif(not _HAS_TRITON, reason="Triton is not installed")


def run_with_triton(code: str, **environment: str) -> None:
    """Run `code`; what it raises fails the test. TRITON_INTERPRET="1" computes without a GPU."""
    paths = [str(_OWN), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
