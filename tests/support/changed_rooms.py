"""Print the folders of tests for what a branch changes: `python -m tests.support.changed_rooms`.

git diff <merge base with main>    mcore_rl/algo/losses.py   tests/data/test_rows.py   README.md
printed                            tests/algo                tests/data                tests/house
"""

import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.support.policy import ROOT

HOUSE = "tests/house"
MAIN = ("origin/main", "main")


def find_test_folders(paths: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the folders of tests for changed files, tests/house always among them.

    A file of a room, or of the room's tests, has the tests of the room.
    """
    found = {HOUSE}
    for parts in (Path(path).parts for path in paths):
        room = parts[1:2] if parts[0] in ("mcore_rl", "tests") else parts[:1]
        folder = Path("tests", *room)
        if room and folder.name not in ("e2e", "scenarios", "support"):
            if folder.suffix == ".py":
                folder = folder.with_name(f"test_{folder.name.removeprefix('test_')}")
            found |= {str(folder)} if (root / folder).exists() else set()
    return sorted(found)


def list_changed_files(root: Path = ROOT) -> list[str]:
    """Return the files that differ from the merge base with main, also without a commit."""
    base = next((name for name in MAIN if _is_known(name, root)), "HEAD")
    fork = _run_git(root, "merge-base", base, "HEAD").strip()
    tracked = _run_git(root, "diff", "--name-only", fork)
    new = _run_git(root, "ls-files", "--others", "--exclude-standard")
    return [*tracked.splitlines(), *new.splitlines()]


def _is_known(name: str, root: Path) -> bool:
    command = ["git", "rev-parse", "--quiet", "--verify", name]
    return not subprocess.run(command, cwd=root, capture_output=True).returncode


def _run_git(root: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    print(*find_test_folders(list_changed_files()))
