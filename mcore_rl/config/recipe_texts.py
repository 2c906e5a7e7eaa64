"""Refuses a recipe file in which YAML reads a text as something else: 1e5, true, 007, 12:30.

On the command line such texts stay as they were typed (overrides.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from omegaconf import OmegaConf

from mcore_rl.config.overrides import find_type


def check_texts(path: Path, cls: type) -> None:
    """Raise ValueError for an option of `cls` that takes a text and would get another one."""
    content = path.read_text()
    read = OmegaConf.to_container(OmegaConf.create(content)) if content.strip() else {}
    _check(yaml.compose(content, yaml.SafeLoader), read, "", cls)


def _check(node: yaml.Node | None, value: Any, name: str, cls: type) -> None:
    """Compare the text of a node of the file with its value in Python."""
    if isinstance(node, yaml.MappingNode) and isinstance(value, Mapping):
        for key, inner in node.value:
            if key.value in value:
                _check(inner, value[key.value], f"{name}.{key.value}".lstrip("."), cls)
    elif isinstance(node, yaml.SequenceNode) and isinstance(value, list):
        for inner, element in zip(node.value, value, strict=True):
            _check(inner, element, name, cls)
    elif isinstance(node, yaml.ScalarNode) and isinstance(value, bool | int | float):
        if str(value) == node.value or not _takes_text(find_type(cls, name)):
            return
        raise ValueError(
            f"{name}: YAML reads {node.value} as {value}; put a text in quotes:"
            f' {name.rpartition(".")[2]}: "{node.value}"'
        )


def _takes_text(kind: Any) -> bool:
    """Whether an option, or an element of it, is a text and never a number or a truth value."""
    kinds = get_args(kind) if get_origin(kind) is Union else (kind,)
    inner = [get_args(k)[0] if get_origin(k) in (list, tuple) else k for k in kinds]
    return all(k in (str, type(None)) for k in inner)
