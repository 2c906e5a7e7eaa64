"""Becomes a worker of Ray, in place of Ray's own setup_worker.py, which imports Ray.

Ray's node starts this file as a script, which imports no package but this one. For a worker with a
runtime environment the script runs Ray's own file. Any other worker is forked from a process that
has all imports of workers (worker_forks.py); without such a process the script becomes the worker.
"""

import json
import os
import sys

from mcore_rl.process.fork_request import fork_detached

FORKS = "MCORE_RL_WORKER_FORKS"
"""The variable that names the socket of the process that forks workers."""
RAYS_OWN = "MCORE_RL_RAY_SETUP_WORKER"
"""The variable that names Ray's setup_worker.py."""
_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="


def main(arguments: list[str]) -> None:
    context = "{}"
    language = ""
    command: list[str] = []
    for argument in arguments:
        if argument.startswith(_CONTEXT):
            context = argument.removeprefix(_CONTEXT)
        elif argument.startswith(_LANGUAGE):
            language = argument.removeprefix(_LANGUAGE)
        else:
            command.append(argument)
    if language != "PYTHON" or not _is_plain(context):
        os.execv(sys.executable, [sys.executable, os.environ[RAYS_OWN], *arguments])
    if not _fork(command):
        os.execv(sys.executable, [sys.executable, "-P", *command])


def _is_plain(context: str) -> bool:
    """Return whether a runtime environment changes nothing."""
    settings = json.loads(context)
    same_python = settings.pop("py_executable", None) in (None, sys.executable)
    return same_python and not any(settings.values())


def _fork(command: list[str]) -> bool:
    """Ask for a fork with this process's environment and output; return whether it was made."""
    path = os.environ.get(FORKS, "")
    return bool(path) and not command[0].startswith("-") and fork_detached(path, command)


if __name__ == "__main__":
    main(sys.argv[1:])
