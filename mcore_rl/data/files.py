"""Finds the data files that a recipe names by file, folder or glob; imports nothing heavy."""

import glob
from collections.abc import Iterable, Sequence
from pathlib import Path

from mcore_rl.config.shipped import describe_making

SUFFIXES = (".parquet", ".jsonl")
REWRITE = "write its rows to one, as a JSON object on each line of .jsonl (docs/recipes.md#prompts)"


def data_files(paths: Sequence[str]) -> list[str]:
    """Return the files in the order of `paths`; those of a folder or glob are sorted by name.

    A folder stands for the files in it and in the folders below, apart from hidden ones. Raises
    ValueError for a path without a file, and for files of another kind.
    """
    return [file for path in paths for file in _files_of(path)]


def _files_of(path: str) -> list[str]:
    if Path(path).is_dir():
        found = _select_data_files(path, Path(path).rglob("*"))
        if not found:
            raise ValueError(
                f"data folder {path} has no .parquet or .jsonl file: give another folder"
            )
        return found
    if not Path(path).exists() and glob.has_magic(path):
        matches = glob.glob(path, recursive=True)
        found = _select_data_files(path, map(Path, matches))
        if not found:
            raise ValueError(
                f"data files {path}: the pattern matches no .parquet or .jsonl file"
                f" ({len(matches)} others); give another one"
            )
        return found
    if not Path(path).is_file():
        raise ValueError(
            f"data file {path} does not exist"
            f"{describe_making(path) or '; `mcore-rl data --help` lists what can be prepared'}"
        )
    if Path(path).suffix not in SUFFIXES:
        raise ValueError(f"data file {path}: expected .parquet or .jsonl; {REWRITE}")
    return [path]


def _select_data_files(top: str, paths: Iterable[Path]) -> list[str]:
    """Return data files by name, without hidden ones and those in hidden folders below `top`."""
    return sorted(
        str(path)
        for path in paths
        if path.suffix in SUFFIXES and path.is_file() and not _is_hidden(path, top)
    )


def _is_hidden(path: Path, top: str) -> bool:
    parts = path.relative_to(top).parts if Path(top).is_dir() else path.parts[-1:]
    return any(part.startswith(("_", ".")) for part in parts)
