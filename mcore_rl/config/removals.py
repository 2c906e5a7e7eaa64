"""Takes options of a recipe out again: ~parallel.dp gives an option, or a group, its default back.

A key of an option with free names (~agents.options.url) and a choice of the list of defaults
(~algorithm) are Hydra's own to delete.
"""

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from mcore_rl.config import Config
from mcore_rl.config.tree import defaults_of, leaves_under, spell

SIGN = "~"


def split_removals(overrides: Sequence[str], choices: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of options and groups to take out, and the other overrides.

    choices   groups of files, such as algorithm, whose removal is Hydra's

    Raises ValueError if another override sets what is to be taken out.
    """
    leaves = leaves_under(Config)
    removed = [
        name
        for name in (word[1:] for word in overrides if word.startswith(SIGN))
        if name in leaves
        or (name not in choices and any(leaf.startswith(f"{name}.") for leaf in leaves))
    ]
    others = [word for word in overrides if word[1:] not in removed or word[0] != SIGN]
    for name in removed:
        for word in others:
            if f"{word.lstrip('+~').partition('=')[0]}.".startswith(f"{name}."):
                raise ValueError(f"{SIGN}{name} takes out what {word} sets: leave one of them out")
    return removed, others


def take_out(tree: DictConfig, names: Sequence[str]) -> None:
    """Set options of a composed recipe back to their defaults.

    Raises ValueError for a name whose options all have their defaults anyway.
    """
    for name in names:
        defaults = dict(defaults_of(Config, name))
        changed = [leaf for leaf, value in defaults.items() if _read(tree, leaf) != value]
        if not changed:
            shown = "" if len(defaults) > 1 else f" ({name}={spell(defaults[name])})"
            raise ValueError(
                f"{SIGN}{name}: there is nothing to take out, as the recipe does not set it: the"
                f" default holds{shown}; leave it out"
            )
        for leaf in changed:
            OmegaConf.update(tree, leaf, defaults[leaf], merge=False)


def _read(tree: DictConfig, name: str) -> object:
    value = OmegaConf.select(tree, name)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
