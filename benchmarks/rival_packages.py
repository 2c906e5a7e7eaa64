"""Installs packages of other systems, which only benchmarks need, in folders of their own."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from quiet_command import DEADLINE_S


def install_once(folder: Path, wanted: str, install: Callable[[], None]) -> None:
    """Call `install`, which fills `folder`, unless it was called for the same `wanted` before."""
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    install()
    stamp.write_text(wanted)


def pip_install(python: Path | str, *arguments: str, timeout_s: float = DEADLINE_S) -> None:
    """Install for this Python what `arguments` name, without what that requires."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-qq", "install", "--no-deps"]
    subprocess.run([*pip, *arguments], check=True, timeout=timeout_s, stdout=sys.stderr)
