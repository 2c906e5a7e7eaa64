"""Imports Python files of users as modules that any process can import by name.

The name of such a module, `mcore_rl.process.user_files.mine_<path in hexadecimal>`, contains the
path of the file. So the file's functions and classes can be pickled: a process that unpickles them,
forked or spawned, imports this module first, which then finds the file. Dataclasses and typing find
the module in sys.modules while the file runs.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

__path__: list[str] = []  # Makes this module a package; _Finder finds its modules.


def import_file(path: Path) -> ModuleType:
    """Import the file `path`, once per process. Errors of the file itself pass through."""
    return importlib.import_module(name_module(path))


def name_module(path: Path) -> str:
    """Return the name of a file's module, which is the same in every process."""
    whole = path.expanduser().resolve()
    stem = "".join(c if c.isalnum() else "_" for c in whole.stem)
    return f"{__name__}.{stem}_{str(whole).encode(errors='surrogateescape').hex()}"


class _Finder:
    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a user's file; None for every other module."""
        parent, _, name = fullname.rpartition(".")
        if parent != __name__:
            return None
        file = bytes.fromhex(name.rpartition("_")[2]).decode(errors="surrogateescape")
        return importlib.util.spec_from_file_location(fullname, file)


sys.meta_path.append(_Finder)
