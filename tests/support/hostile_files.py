"""Small files that take a reader for ever, or all its memory."""

import pickle
import zipfile
from pathlib import Path

DEPTH = 60


def nested_key() -> bytes:
    """Return pickle opcodes of a tuple whose hash takes 2**DEPTH steps."""
    return b")" + b"2\x86" * DEPTH  # (), then DUP and TUPLE2


def dict_with_nested_key() -> bytes:
    """Return a pickle of a dictionary with that key."""
    return b"\x80\x02}" + nested_key() + b"K\x01s."


def write_archive(path: Path, data: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    """Write an archive as torch.save lays it out, around the pickle `data`."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")


def write_zip_bomb(path: Path, num_bytes: int) -> None:
    """Write an archive whose pickle is a text of `num_bytes` zeros."""
    write_archive(path, pickle.dumps("0" * num_bytes), zipfile.ZIP_DEFLATED)
