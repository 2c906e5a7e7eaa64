"""The policy tests share the repository's tracked files and their syntax trees."""

import ast
import subprocess
from functools import cache
from pathlib import Path

from mcore_rl.process.gc_pause import without_collector

ROOT = Path(__file__).resolve().parents[2]


def tracked(*suffixes: str) -> list[Path]:
    """Files that git tracks or would track, relative to the repository, by ending if given."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    paths = [Path(name) for name in sorted(set(names)) if not suffixes or name.endswith(suffixes)]
    return [path for path in paths if (ROOT / path).is_file()]


def python_files(*folders: str) -> list[Path]:
    return [path for path in tracked(".py") if not folders or path.parts[0] in folders]


@cache
def read(path: Path) -> str:
    return (ROOT / path).read_text()


@cache
def parse(path: Path) -> ast.Module:
    """Return a tree that is kept; the garbage collector would walk through millions of nodes."""
    with without_collector():
        return ast.parse(read(path), str(path))
