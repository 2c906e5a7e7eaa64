"""Refuses an environment that cannot work, before a run starts anything."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from mcore_rl.agents.environments import probe
from mcore_rl.agents.environments.adapters import ADAPTERS, check_names, find_adapter
from mcore_rl.agents.environments.worker_process import (
    EnvironmentOptions,
    make_import_folder,
    make_worker_environment,
)
from mcore_rl.process.safe_path import start_module

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
                start_module(python, probe.__name__),
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
    answers = [line for line in done.stdout.splitlines() if line.startswith(probe.MARK)]
    if not answers:
        return [f"the check ended with status {done.returncode}: {done.stderr[-1000:].strip()}"]
    return json.loads(answers[-1].removeprefix(probe.MARK))
