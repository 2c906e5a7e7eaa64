"""Makes once in a test run what tests in several of its processes read."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.process.file_lock import hold_lock

WAIT_S = 600.0


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder that `make` filled: the first process to ask makes it, others wait for it.

    Nobody may change what is in it.
    """
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / name, shared / f"{name}.done"
    with hold_lock(shared / f"{name}.lock", WAIT_S):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
