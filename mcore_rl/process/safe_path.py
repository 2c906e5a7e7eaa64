"""Starts Python without the working folder on its path, where a random.py would replace Python's.

    python -m module     working folder first    (never used here)
    python -P -m module  not at all              processes of this package
    PYTHONSAFEPATH       not at all              processes that multiprocessing and Ray start
    start_module         last                    processes that import the user's modules

The standard library must come before the user's files, which may have any name.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

SAFE_PATH = "PYTHONSAFEPATH"
_OURS = "mcore_rl"
"""Our value of the variable, which distinguishes it from the user's."""
_CHECKOUT = str(Path(__file__).parents[2])
_START = (
    "import sys; sys.path[:1] == [''] and sys.path.append(sys.path.pop(0));"
    "from runpy import run_module; run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""The first statement imports no file, so nothing is imported from the working folder."""


def safe_module(module: str) -> list[str]:
    """Return the command that runs a module of this package or of Ray; append the arguments."""
    return [sys.executable, "-P", "-m", module]


def start_module(python: str, module: str) -> list[str]:
    """Return the command with which any interpreter runs a module that imports the user's files.

    The working folder is last on the path. Interpreters before 3.11 have no option -P.
    """
    return [python, "-c", _START, module]


def keep_path_safe() -> None:
    """Remove the working folder from the path of Python processes that libraries start from here.

    If this package runs from the working folder, uninstalled, the folder goes into PYTHONPATH.
    """
    os.environ.setdefault(SAFE_PATH, _OURS)
    named = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if os.path.abspath(sys.path[0]) == _CHECKOUT and _CHECKOUT not in named:
        os.environ["PYTHONPATH"] = os.pathsep.join([_CHECKOUT, *named])


def without_safe_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a user's program, which may import files beside it."""
    return {name: text for name, text in environ.items() if (name, text) != (SAFE_PATH, _OURS)}


def let_programs_be() -> None:
    """Undo keep_path_safe for child processes, because these run the user's code.

    Processes that multiprocessing spawns still leave out the working folder if this process does.
    """
    if os.environ.get(SAFE_PATH) == _OURS:
        del os.environ[SAFE_PATH]


def put_last(folder: str) -> None:
    """Move `folder` to the end of sys.path, unless PYTHONPATH names it."""
    named = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if folder not in named:
        sys.path[:] = [*(path for path in sys.path if path not in ("", folder)), folder]
