"""The folder of each check beneath --logs, in which its small files outlive it.

runs/doctor/run_GRPO_with_SGLang.log    what the check printed
runs/doctor/run_GRPO_with_SGLang/       its files: the run's logs and metrics, an outcome, ...
"""

import os
import shutil
from pathlib import Path

FOLDER = "MCORE_RL_KIT_FOLDER"
"""The variable by which a check's process is told its folder."""
LARGEST_KEPT_MIB = 4
"""Larger files, weights and checkpoints, are removed once the check has ended; text stays."""
_TEXT = (".log", ".jsonl", ".json", ".txt")


def own_folder() -> Path:
    """Return the folder of the check that this process carries out; it is empty at first."""
    return Path(os.environ[FOLDER])


def make_empty(folder: Path) -> None:
    """Make the folder, without what an earlier check has left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def remove_large_files(folder: Path) -> list[str]:
    """Remove the files that are too large to keep; return their paths below the folder."""
    removed = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file() or path.suffix in _TEXT:
            continue
        if path.stat().st_size > LARGEST_KEPT_MIB << 20:
            path.unlink()
            removed.append(str(path.relative_to(folder)))
    return removed
