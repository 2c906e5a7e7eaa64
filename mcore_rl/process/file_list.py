"""Reads checksums.json, a folder's list of files, and compares the folder with the list.

    {"algorithm": "crc32", "files": {"common.pt": {"bytes": 1200, "spans": [...]}, ...}}

Sizes are compared here; weights/hf/checksums.py compares the bytes.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

INCOMPLETE = ".incomplete"
"""Suffix of a checkpoint's folder while it is written."""
MANIFEST = "checksums.json"
METADATA = ".metadata"
"""The only hidden file of a checkpoint."""
MAX_JSON_BYTES = 256 << 20
"""A larger JSON file is refused, not read; an entry takes about 40 bytes."""


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises ValueError, without the path, if the file is no JSON, nested too deeply or too large.
    """
    num_bytes = path.stat().st_size
    if num_bytes > MAX_JSON_BYTES:
        raise ValueError(f"it has {num_bytes} bytes, at most {MAX_JSON_BYTES} are read")
    try:
        return json.loads(path.read_text())
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def find_fault(folder: Path) -> str:
    """Return how a checkpoint's folder differs from its list of files; "" if they agree.

    The list names each file and its size. A folder without a list, from an older version, needs
    the files that every checkpoint has.
    """
    path = folder / MANIFEST
    if not path.is_file():
        required = (METADATA, "metadata.json", "common.pt")
        missing = [name for name in required if not (folder / name).is_file()]
        return f"{folder} has neither {MANIFEST} nor {missing[0]}" if missing else ""
    try:
        sizes = {name: int(entry["bytes"]) for name, entry in read_json(path)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path} is damaged ({error!r})"
    return find_difference(folder, sizes)


def find_difference(folder: Path, sizes: Mapping[str, int]) -> str:
    """Return how the files of a folder differ from `sizes` (name -> bytes); "" if they agree."""
    for name, num_bytes in sorted(sizes.items()):
        path = folder / name
        if not is_inside(name):
            return f"{folder / MANIFEST} names {name!r}, which is not a file of the folder"
        if not path.is_file():
            return f"{path}, named in {MANIFEST}, does not exist"
        size = path.stat().st_size
        if size != num_bytes:
            return f"{path} has {size} bytes, by {MANIFEST} it should have {num_bytes}"
    unlisted = next((name for name in list_files(folder) if name not in sizes), None)
    return "" if unlisted is None else f"{folder / unlisted} is not in {MANIFEST}"


def is_inside(name: str) -> bool:
    """Return whether a path of the list stays within the folder."""
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def list_files(folder: Path) -> Iterator[str]:
    """Yield the paths, relative to `folder`, of the files that the folder's list must name.

    Left out are the list itself, files under temporary names, and hidden files, such as .git and
    files that NFS keeps open.
    """
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        is_hidden = any(part.startswith(".") for part in parts) and parts != (METADATA,)
        if path.is_file() and not is_hidden and parts != (MANIFEST,) and path.suffix != ".part":
            yield "/".join(parts)
