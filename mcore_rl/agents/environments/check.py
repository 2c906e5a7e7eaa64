"""Refuses an environment that cannot work, before a run starts anything.

The interpreter of the environment's workers runs this module, too. It then reads JSON from stdin:
kind, options, modules that must be there. It prints a list of problems as JSON behind a mark, as
imports may print as well.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.agents.environments.adapters import (
    ADAPTERS,
    check_names,
    check_options,
    describe_failure,
    find_adapter,
)
from mcore_rl.agents.environments.worker_process import (
    EnvironmentOptions,
    make_import_folder,
    make_worker_environment,
)
from mcore_rl.process.safe_path import start_module

MARK = "problems of the environment: "
OLDEST_PYTHON = (3, 11)
_PACKAGE = Path(__file__).resolve().parents[2]
_PROBE_S = 120.0
"""Imports may bring torch along, from a slow file system."""


def check(options: EnvironmentOptions) -> None:
    """Raise ValueError, with a remedy, if workers could not make the environment.

    Asks the workers' interpreter, which takes about as long as it takes to start. Packages of
    adapters are looked for, and the user's code is imported.
    """
    adapter = find_adapter(options.kind)
    if options.kind in ADAPTERS or (adapter is None and ":" not in options.kind):
        check_names(options.kind, options.options)
    modules = adapter.modules if adapter else ()
    python = options.python or sys.executable
    for problem in _ask(python, options, modules):
        packages = " ".join(adapter.packages) if adapter else ""
        remedy = ""
        if packages and problem.startswith("it has no"):
            remedy = f": {python} -m pip install {packages}, or name another interpreter as python"
        raise ValueError(f"agents.environment={options.kind} under {python}: {problem}{remedy}")


def _ask(python: str, options: EnvironmentOptions, modules: tuple[str, ...]) -> list[str]:
    question = {"kind": options.kind, "options": dict(options.options), "modules": modules}
    with tempfile.TemporaryDirectory(prefix="mcore_rl_probe_") as folder:
        make_import_folder(Path(folder))
        try:
            done = subprocess.run(
                start_module(python, __name__),
                input=json.dumps(question),
                env=make_worker_environment(options, Path(folder)),
                capture_output=True,
                text=True,
                timeout=_PROBE_S,
            )
        except OSError as error:
            return [f"it cannot be started: {error}; name an interpreter as python"]
        except subprocess.TimeoutExpired:
            return [f"it did not say within {_PROBE_S:g} s whether it can make the environment"]
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not answers:
        return [f"the check ended with status {done.returncode}: {done.stderr[-1000:].strip()}"]
    return json.loads(answers[-1].removeprefix(MARK))


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
