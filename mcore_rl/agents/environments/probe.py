"""Says what is wrong with an environment's options, under the interpreter of its workers.

Reads JSON from stdin: kind, options, modules that must be there. Prints a list of problems as JSON
behind a mark, as imports may print, too.
"""

import importlib.util
import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.agents.environments.adapters import check_options, describe_failure

MARK = "problems of the environment: "
OLDEST_PYTHON = (3, 11)
_PACKAGE = Path(__file__).resolve().parents[2]


def list_problems(kind: str, options: Mapping[str, Any], modules: Sequence[str]) -> list[str]:
    """Return what keeps environments of this kind from being made here, in words for the user."""
    if sys.version_info < OLDEST_PYTHON:
        version = ".".join(map(str, sys.version_info[:3]))
        return [f"it is Python {version}: workers need 3.11 or newer"]
    missing = [name for name in modules if not is_there(name)]
    if missing:
        return [f"it has no {', '.join(missing)}"]
    try:
        check_options(kind, options)
    except (Exception, SystemExit) as error:  # a user's own file may raise anything
        return [str(error) if _is_ours(error) else describe_failure(error)]
    return []


def _is_ours(error: BaseException) -> bool:
    """Return whether this package refused something: its words need no place in a file."""
    frames = traceback.extract_tb(error.__traceback__)
    file = Path(frames[-1].filename).resolve()
    return isinstance(error, ValueError) and file.is_relative_to(_PACKAGE)


def is_there(module: str) -> bool:
    """Return whether a module can be found; its packages are imported, it is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def main() -> None:
    given = json.load(sys.stdin)
    found = list_problems(given["kind"], given["options"], given["modules"])
    print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
