"""Finds the advantage and the loss that the options choose, and what both need from a run.

A user's Python file (algorithm.path) registers further ones. The controller reads the file once,
and its text travels with the loss. So every rank runs the same source, also on machines that cannot
see the file.
"""

import hashlib
import sys
import traceback
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType

from mcore_rl.algo import advantages as built_in_advantages
from mcore_rl.algo import losses as built_in_losses
from mcore_rl.algo.correction import REJECTIONS, WEIGHTS
from mcore_rl.algo.preferences import needs_reference
from mcore_rl.algo.registry import Advantage, Needs, PolicyLossMaker, advantages, losses
from mcore_rl.config import AlgorithmConfig
from mcore_rl.rewards.user_function import describe_failure, find_file

BUILT_IN = (built_in_advantages, built_in_losses)
"""The modules that register the built-in functions when they are imported."""


@dataclass(frozen=True)
class UserFile:
    """path: as in the recipe, for error messages; source: the file's text."""

    path: str
    source: str


_files: dict[str, UserFile] = {}


def user_file_of(config: AlgorithmConfig) -> UserFile | None:
    """Return the file at `algorithm.path`, as it was when this process first asked, or None."""
    return _read_once(config.path) if config.path else None


def advantage_of(config: AlgorithmConfig) -> Advantage:
    """Return the chosen advantage.

    Raises ValueError naming the option if the name is unknown or `algorithm.path` cannot be used.
    """
    _register(user_file_of(config))
    return advantages[config.advantage]


def loss_of(config: AlgorithmConfig, user_file: UserFile | None) -> PolicyLossMaker:
    """Return the maker of the chosen loss.

    Raises ValueError naming the option if the name is unknown. `user_file` comes from
    `user_file_of` in the controller: ranks may not see the file itself.
    """
    _register(user_file)
    return losses[config.loss]


def needs_of(config: AlgorithmConfig) -> Needs:
    """Return what the chosen advantage, loss, correction and KL need together.

    Raises ValueError naming the option if a name is unknown or `algorithm.path` cannot be used.
    """
    _register(user_file_of(config))
    own = advantages.needs(config.advantage).join(losses.needs(config.loss))
    own = own.join(WEIGHTS.needs(config.correction.weight_name))
    own = own.join(REJECTIONS.needs(config.correction.reject))
    has_kl = config.kl.coef != 0
    pairs_need_reference = own.pairs and needs_reference(config.preference)
    return replace(
        own,
        whole_batch=config.correction.normalize,
        reference=own.reference or has_kl or pairs_need_reference,
        old_logprobs=own.old_logprobs or own.sum_squares or (has_kl and config.kl.in_reward),
    )


def _register(user_file: UserFile | None) -> None:
    if user_file is not None:
        register_user_file(user_file)


def adopt_user_file(user_file: UserFile) -> None:
    """Use this text for its path in this process, which may not see the file itself."""
    _files.setdefault(user_file.path, user_file)


def _read_once(path: str) -> UserFile:
    """Read the file once, so that an edit during a run does not reach some processes only."""
    if path not in _files:
        _files[path] = read_user_file(path)
    return _files[path]


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
