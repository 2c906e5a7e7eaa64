"""Finds the files of a published data set: in a local folder, or on the Hugging Face hub."""

from collections.abc import Sequence
from pathlib import Path


def source_folder(source: str, patterns: Sequence[str]) -> Path:
    """Return the folder `source`, or the copy of the hub's data set of this name.

    `patterns`: files to download. Raises ValueError if there is neither.
    """
    return Path(source) if Path(source).is_dir() else _download(source, patterns)


def files_of_split(folder: Path, split: str) -> list[str]:
    """Return the parquet and jsonl files with the split in their names, in order.

    Raises ValueError if there is none.
    """
    files = sorted(
        p for p in folder.rglob("*") if split in p.name and p.suffix in (".parquet", ".jsonl")
    )
    if not files:
        raise ValueError(f"{folder}: no .parquet or .jsonl file with {split!r} in its name")
    return [str(path) for path in files]


def _download(name: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        copy = snapshot_download(name, repo_type="dataset", allow_patterns=list(patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        raise ValueError(
            f"--source {name}: neither a local folder nor reachable on the hub"
            f" ({type(error).__name__}); download it elsewhere and give the folder"
        ) from None
    return Path(copy)
