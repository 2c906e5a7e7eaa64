"""Loads classes and functions that a user names as `module:name` or `folder/file.py:name`."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


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
    key = f"_mcore_rl_file_{path}"
    if key in sys.modules:
        return sys.modules[key]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
    return module
