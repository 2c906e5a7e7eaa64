"""Loads classes and functions that a user names as `module:name` or `folder/file.py:name`."""

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from mcore_rl.process.errors import describe_error
from mcore_rl.process.user_files import import_file


def load_named(name: str) -> Any:
    """Return what `module:name` or `file.py:name` names.

    A file's folder is added to sys.path, so that it can import its neighbors. Raises ValueError if
    there is no such file, module or name; errors of the file itself pass through.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise ValueError(f"{name!r} names nothing: write module:name or folder/file.py:name")
    module = _module_of_file(place) if place.endswith(".py") else _module(place, name)
    if not hasattr(module, attribute):
        raise ValueError(f"{place} has no {attribute!r}, which {name!r} asks for")
    return getattr(module, attribute)


def _module(place: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise ValueError(
                f"{sys.executable} finds no module {place!r}, which {name!r} asks for: install it "
                "there, or name a file as folder/file.py:name"
            ) from error
        raise


def _module_of_file(place: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {path}, which {place!r} names")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return import_file(path)


def describe_failure(error: BaseException) -> str:
    """Return one line about what a user's code raised: error, file, line and remedy."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen")
    ]
    where = f", at {frames[-1].filename} line {frames[-1].lineno}" if frames else ""
    remedy = "mend it"
    if isinstance(error, ModuleNotFoundError):
        remedy = f"install {error.name} for {sys.executable}, or name another interpreter"
    return f"{describe_error(error)}{where}; {remedy}"
