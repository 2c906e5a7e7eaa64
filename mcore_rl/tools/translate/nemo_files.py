"""Reads NeMo-RL's configurations, whose `defaults` name others, and overrides key=value."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mcore_rl.tools.translate.hydra import flatten, load_tree, parse_overrides
from mcore_rl.tools.translate.translation import ForeignOptions

ARITHMETIC = {
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}
"""Functions that NeMo-RL's configurations call in ${...}."""
REPLACES = "_override_"
"""A group that has it takes the place of the inherited one, instead of changing it."""


def read_nemo_rl(arguments: Sequence[str]) -> ForeignOptions:
    """Return the options of a configuration and of overrides; later ones win.

    A whole command line may have what runs NeMo-RL: `uv run examples/run_grpo.py --config
    <file> key=value`. Raises ValueError naming the file or the override that cannot be read.
    """
    words = list(arguments)
    programs = [i for i, word in enumerate(words) if word.endswith(".py")]
    words = words[programs[-1] + 1 :] if programs else words
    tree = OmegaConf.create({})
    files = []
    overrides = []
    for word in words:
        name = word.removeprefix("--config=")
        if word == "--config":
            continue
        if name.endswith((".yaml", ".yml")) and "=" not in name:
            files.append(name)
            tree = _inherit(tree, _load(Path(name)), Path(name))
        else:
            overrides.append(word)
    given = parse_overrides(overrides)
    for name, value in given.items():
        OmegaConf.update(tree, name, value, merge=False, force_add=True)
    if not files:
        return ForeignOptions(given, is_whole=False)
    return ForeignOptions(flatten(_resolved(tree, files[-1])), is_whole=True)


def _load(path: Path, readers: tuple[Path, ...] = ()) -> DictConfig:
    if path in readers:
        raise ValueError(f"{path}: its `defaults` lead back to itself")
    tree = load_tree(path, f", which {readers[-1]} names in `defaults`" if readers else "")
    if not isinstance(tree, DictConfig):
        raise ValueError(f"{path}: no configuration in YAML: it is a list")
    named: Any = tree.pop("defaults", None) or []
    merged = OmegaConf.create({})
    for name in [named] if isinstance(named, str) else named:
        merged = _inherit(merged, _load(path.parent / str(name), (*readers, path)), path)
    return _inherit(merged, tree, path)


def _inherit(parent: DictConfig, child: DictConfig, path: Path) -> DictConfig:
    for name in list(child):
        group = child._get_node(name)
        if isinstance(group, DictConfig) and not group._is_none() and REPLACES in group:
            del group[REPLACES]
            parent.pop(name, None)
    try:
        merged = OmegaConf.merge(parent, child)
    except OmegaConfBaseException as error:
        raise ValueError(
            f"{path}: it cannot be merged with its `defaults`: {error}; a group with"
            f" {REPLACES}: true takes the place of the inherited one"
        ) from None
    assert isinstance(merged, DictConfig), type(merged)
    return merged


def _resolved(tree: DictConfig, file: str) -> dict[str, Any]:
    for name, function in ARITHMETIC.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    try:
        content = OmegaConf.to_container(tree, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ValueError(f"{file}: no configuration in YAML: {error}") from None
    finally:
        for name in ARITHMETIC:
            OmegaConf.clear_resolver(name)
    assert isinstance(content, dict), type(content)
    return {str(name): value for name, value in content.items()}
