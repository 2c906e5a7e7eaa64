"""Folders of live owners stay, those of killed ones go."""

import subprocess
import sys
from pathlib import Path

from mcore_rl.process.folders import TempDir, sweep

OWN_A_FOLDER = """
import os, signal, sys
from mcore_rl.process.folders import TempDir
folder = TempDir(sys.argv[1])
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_folders_without_an_owner_are_swept(tmp_path):
    killed = subprocess.run(
        [sys.executable, "-c", OWN_A_FOLDER, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    left = Path(killed.stdout.strip())
    mine, other = TempDir(str(tmp_path)), tmp_path / "not_ours"
    other.mkdir()
    assert left.is_dir(), "too young to be swept"
    sweep(str(tmp_path), min_age_s=0.0)
    assert not left.exists()
    assert Path(mine.path).is_dir() and other.is_dir()
    mine.remove()
    mine.remove()
    assert not Path(mine.path).exists()
