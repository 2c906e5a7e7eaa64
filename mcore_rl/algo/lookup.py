"""Finds the advantage and the loss that the options choose, and what both need from a run."""

from dataclasses import replace

from mcore_rl.algo import advantages as built_in_advantages
from mcore_rl.algo import losses as built_in_losses
from mcore_rl.algo import sequence_losses
from mcore_rl.algo.correction import REJECTIONS, WEIGHTS
from mcore_rl.algo.preferences import needs_reference
from mcore_rl.algo.registry import Advantage, Needs, PolicyLossMaker, advantages, losses
from mcore_rl.algo.user_file import UserFile, read_user_file, register_user_file
from mcore_rl.config import AlgorithmConfig

BUILT_IN = (built_in_advantages, built_in_losses, sequence_losses)
"""The modules that register the built-in functions when they are imported."""


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


_files: dict[str, UserFile] = {}


def _read_once(path: str) -> UserFile:
    """Read the file once, so that an edit during a run does not reach some processes only."""
    if path not in _files:
        _files[path] = read_user_file(path)
    return _files[path]
