"""Mounts filesystems that are too small, for this process or for one child alone."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.policy import ROOT


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """Mount a filesystem at `folder` for the block."""
    folder.mkdir()
    mount = ["mount", *options, "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a filesystem")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def call_with_full_disk(program: str, folder: Path, given: Any, timeout_s: float = 300.0) -> Any:
    """Run a Python program that alone sees a disk without space at `folder`.

    The program gets `given` and answers by JSON: its first argument, and the last line it prints.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"]).returncode:
        pytest.skip("only root can mount a filesystem")
    fill = f"{_quoted(mount)} && (cat /dev/zero > '{folder}/filler' 2> /dev/null; exec \"$@\")"
    command = [sys.executable, "-c", program, json.dumps(given)]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", fill, "sh", *command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def _quoted(words: Sequence[str]) -> str:
    return " ".join(f"'{word}'" for word in words)
