"""Runs a user's Python file (algorithm.path), which registers advantages and losses.

A file is read once, by the controller; its text travels with the loss. So every rank runs the same
source, also on machines that cannot see the file.
"""

import hashlib
import sys
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from mcore_rl.algo.registry import advantages, losses
from mcore_rl.rewards.user_function import describe_failure, find_file


@dataclass(frozen=True)
class UserFile:
    """path: as in the recipe, for error messages; source: the file's text."""

    path: str
    source: str


def read_user_file(path: str) -> UserFile:
    """Raise ValueError if there is no such file in the working directory or beside recipes/."""
    return UserFile(path, find_file("algorithm.path", path).read_text())


@cache
def register_user_file(file: UserFile) -> None:
    """Run the file, once per process; its decorators register advantages and losses.

    Raises ValueError if the file raises, registers nothing, or takes a name that is taken. Nothing
    that it registered is left behind then.
    """
    before = [(registry, registry.names) for registry in (advantages, losses)]
    try:
        _execute(file)
        if all(registry.names == names for registry, names in before):
            raise ValueError(
                f"algorithm.path={file.path}: registers no advantage and no loss; decorate"
                " functions with advantages.register or losses.register of mcore_rl.algo.registry"
            )
    except BaseException:
        for registry, names in before:
            registry.keep_only(names)
        raise


def _execute(file: UserFile) -> None:
    digest = hashlib.sha256(file.source.encode()).hexdigest()[:12]
    module = ModuleType(f"mcore_rl_algorithm_{Path(file.path).stem}_{digest}")
    module.__file__ = file.path
    sys.modules[module.__name__] = module  # dataclasses look their module up here
    try:
        exec(compile(file.source, file.path, "exec"), vars(module))
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        del sys.modules[module.__name__]
        line = _line_of(error, file.path)
        raise ValueError(f"algorithm.path={file.path}{line}: {describe_failure(error)}") from error


def _line_of(error: BaseException, path: str) -> str:
    """Return " line <n>", the last line of the file that was running, or "" if none was."""
    if isinstance(error, SyntaxError):
        return f" line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    numbers = [frame.lineno for frame in frames if frame.filename == path]
    return f" line {numbers[-1]}" if numbers else ""
