"""Folders as a finished save leaves them, with files that stand for a checkpoint's."""

from pathlib import Path

from mcore_rl.weights.hf.checksums import sum_small_files, write_manifest

FILES = {
    ".metadata": "where everything lies",
    "metadata.json": "{}",
    "common.pt": "step and layout",
    "__0_0.distcp": "weights" * 100,
}


def write_checkpoint(folder: str | Path) -> Path:
    """Write FILES and their list to `folder`, which is returned."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    write_manifest(folder, sum_small_files(folder, ()))
    return folder


def flip_byte(path: Path) -> None:
    """Change one byte of a file and keep its size."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
