"""Composes a recipe's YAML files and overrides with Hydra, and returns a checked Config."""

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from mcore_rl.config import Config
from mcore_rl.config.bounds import check_bounds
from mcore_rl.config.other_systems import find_option
from mcore_rl.config.overrides import find_type, quote, split_removals, take_out, to_hydra
from mcore_rl.config.secrets import remember_secrets
from mcore_rl.config.shipped import RECIPES_DIR, resolve_shipped
from mcore_rl.config.tree import leaves_under, mappings_under


def list_recipes(recipes_dir: Path = RECIPES_DIR) -> dict[str, str]:
    """Recipe names with the first comment line of each file."""
    return {path.stem: _headline(path) for path in sorted(recipes_dir.glob("*.yaml"))}


def list_groups(recipes_dir: Path = RECIPES_DIR) -> list[str]:
    """Groups of files that recipes choose from: algorithm, cluster, model and the user's own."""
    names = {path.parent.name for path in recipes_dir.glob("*/*.yaml")}
    return sorted(names - {"launch"})


def load_recipe(recipe: str, overrides: list[str], recipes_dir: Path = RECIPES_DIR) -> Config:
    """The typed configuration of `recipe` (a name in `recipes_dir`, or a YAML file) with
    `overrides` applied.

    Raises ValueError naming the recipe, the key or value at fault, and the nearest right key.
    """
    path = find_recipe(recipe, recipes_dir)
    if not path.is_file():
        known = sorted(list_recipes(recipes_dir))
        raise ValueError(
            f"recipe={recipe}: no file {path}.{_nearest(recipe, known)} Recipes: {', '.join(known)}"
        )
    try:
        check_texts(path, Config)
        removed, others = split_removals(overrides, list_groups(recipes_dir))
        tree = _compose(path, others, recipes_dir)
        take_out(tree, removed)
        return make_config(tree)
    except yaml.YAMLError as error:
        raise ValueError(f"recipe {recipe}: no YAML that is read here: {error}") from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        missing = _explain_missing(error, (path.parent, recipes_dir))
        raise ValueError(f"recipe {recipe}: {missing or _explain(error, overrides)}") from None


def find_base(recipe: str, overrides: Sequence[str]) -> Config | None:
    """Return the recipe that `recipe`, with `overrides`, starts from, or None.

    That is the one that the file takes by its list of defaults, or else the file without overrides.
    """
    path = find_recipe(recipe, RECIPES_DIR)
    tree = yaml.safe_load(path.read_text()) or {}
    entries = tree.get("defaults", []) if isinstance(tree, dict) else []
    for name in (entry for entry in entries if isinstance(entry, str)):
        beside = path.parent / f"{name}.yaml"
        if name != "schema" and (beside.is_file() or name in list_recipes()):
            return _load_whole(str(beside) if beside.is_file() else name)
    return _load_whole(recipe) if overrides else None


def _load_whole(recipe: str) -> Config | None:
    """Return a recipe as it is, None if it needs overrides to be one."""
    try:
        return load_recipe(recipe, [])
    except ValueError:
        return None


def find_recipe(recipe: str, recipes_dir: Path) -> Path:
    """Return the file of a recipe, which need not be there: a name, or the file itself."""
    return Path(recipe) if recipe.endswith((".yaml", ".yml")) else recipes_dir / f"{recipe}.yaml"


@cache
def _store_schema() -> None:
    """Store the options' types where Hydra looks for them, once in a process: it takes 0.1 s."""
    ConfigStore.instance().store(name="schema", node=Config)


def _compose(path: Path, overrides: list[str], recipes_dir: Path) -> DictConfig:
    _store_schema()
    with initialize_config_dir(str(path.resolve().parent), version_base="1.3"):
        shipped = f"hydra.searchpath=[{quote(f'file://{recipes_dir.resolve()}')}]"
        readable = [to_hydra(override, Config) for override in overrides]
        return compose(path.stem, overrides=[shipped, *readable])


def check_texts(path: Path, cls: type) -> None:
    """Raise ValueError for a text of a recipe file that YAML reads as something else: 1e5, 12:30.

    `cls` is the class whose options the file sets. On the command line such texts stay as they
    were typed (overrides.py).
    """
    content = path.read_text()
    read = OmegaConf.to_container(OmegaConf.create(content)) if content.strip() else {}
    _check_node(yaml.compose(content, yaml.SafeLoader), read, "", cls)


def _check_node(node: yaml.Node | None, value: Any, name: str, cls: type) -> None:
    """Compare the text of a node of the file with its value in Python."""
    if isinstance(node, yaml.MappingNode) and isinstance(value, Mapping):
        for key, inner in node.value:
            if key.value in value:
                _check_node(inner, value[key.value], f"{name}.{key.value}".lstrip("."), cls)
    elif isinstance(node, yaml.SequenceNode) and isinstance(value, list):
        for inner, element in zip(node.value, value, strict=True):
            _check_node(inner, element, name, cls)
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


def make_config(tree: DictConfig) -> Config:
    """The checked configuration of a composed tree. Raises ValueError naming the key at fault."""
    for key in tree:
        if key not in Config.__dataclass_fields__:
            raise ValueError(f"unknown key {key!r}.{_nearest(str(key), leaves())}")
    if not Config.__dataclass_fields__.keys() <= tree.keys():
        raise ValueError(
            "its list of defaults has neither schema nor another recipe: begin the file with"
            " `defaults: [schema, _self_]`, or with the recipe that it changes (docs/recipes.md)"
        )
    for name in mappings_under(Config):
        options = OmegaConf.select(tree, name)
        if options is not None:
            _drop_nulls(options)
    values = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    remember_secrets(tree)
    assert isinstance(values, dict)
    # Before the classes check themselves: they don't know where in the tree they stand.
    check_bounds(Config, {str(key): value for key, value in values.items()})
    config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    config.model.path = resolve_shipped(config.model.path)
    return config


def _drop_nulls(options: DictConfig) -> None:
    """Leave out options by free names that are set to null, as an override of a recipe's may be."""
    with open_dict(options):
        for name in [name for name, value in options.items() if value is None]:
            del options[name]


def require(values: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first option ("model.path") whose value is unset or empty."""
    for key, value in values.items():
        if value in ("", [], None):
            raise ValueError(f"{key} is not set: give it in the recipe or as {key}=<value>")


def leaves() -> list[str]:
    """Dotted names of all options."""
    return leaves_under(Config)


def leaves_of(overrides: Sequence[str]) -> list[str]:
    """The options that `overrides` set one by one; a group ("algorithm=dapo") is none."""
    names = [override.partition("=")[0].lstrip("+") for override in overrides]
    return sorted(
        leaf
        for leaf in leaves()
        if any(name == leaf or name.startswith(f"{leaf}.") for name in names)
    )


def _explain(error: BaseException, overrides: Sequence[str]) -> str:
    """One line: what was wrong, and the nearest right key where a key was wrong."""
    chain = [error]
    while isinstance(inner := chain[-1].__cause__ or chain[-1].__context__, Exception):
        chain.append(inner)
    root = next((e for e in chain if getattr(e, "full_key", None)), error)
    key = getattr(root, "full_key", None)
    first_line = str(root).strip().splitlines()[0]
    if found := _NO_GROUP.search(str(root)):
        return _explain_no_group(found["value"], found["kind"])
    if isinstance(root, OverrideParseException):
        if root.override not in first_line:
            first_line = f"{root.override}: {first_line}"
        first_line += (
            "; overrides have the form key=value, texts in lists and mappings may be quoted, as in"
            " \"key=['a,b','c']\""
        )
    if first_line.startswith("Ambiguous value"):
        first_line += ": lists have brackets, as key=[a,b], texts with commas quotes: key='a,b'"
    if found := _NO_NUMBER.search(first_line):
        kind = "a whole number in digits" if found[1] == "Integer" else "a number, as 0.5 or 1e-6"
        first_line += f": give {kind}"
    if key and key not in leaves():
        names = [override.partition("=")[0].lstrip("+~") for override in overrides]
        under = (name for name in names if name.startswith(f"{key}.") and find_option(name))
        name = next(under, key)
        if any(leaf.startswith(f"{name}.") for leaf in leaves()):
            return _explain_group(name, "none")
        return f"unknown key {name!r}.{_nearest(name, leaves())}"
    if found := _DELETED.match(first_line):
        return f"~{found[1]}: the recipe has no such key.{_nearest(found[1], leaves())}"
    if found := _CHOICE.match(first_line):
        group = found[1]
        own = next((leaf for leaf in leaves() if leaf.startswith(f"{group}.")), "")
        first_line += f" {group}=<name> replaces a choice of the recipe, which makes none; set"
        first_line += f" single options, as {own}=<value>, or add +{group}=<name>"
    return f"{key}: {first_line}" if key else first_line


def _explain_no_group(value: str, class_name: str) -> str:
    """Return that a group of options, which only its class names, has a value in a file."""
    groups = {field.type: name for name, field in Config.__dataclass_fields__.items()}
    names = {getattr(kind, "__name__", ""): name for kind, name in groups.items()}
    return _explain_group(names.get(class_name, class_name), f"the value {value}")


def _explain_group(name: str, given: str) -> str:
    own = next((leaf for leaf in leaves() if leaf.startswith(f"{name}.")), f"{name}.<option>")
    return (
        f"{name} is a group of options, and gets {given}: indent its options below {name}: in a"
        f" file, or give one, as {own}=<value>"
    )


_MISSING = re.compile(r"(?:In '.*?': )?Could not (?:find|load) '(?P<name>[^']+)'")


def _explain_missing(error: BaseException, folders: Sequence[Path]) -> str:
    """Return what there is instead of a file that a list of defaults names; else an empty text.

    folders   where recipes are looked up: the recipe's own, the shipped one
    """
    found = _MISSING.match(str(error))
    if found is None:
        return ""
    group, _, name = found["name"].rpartition("/")
    known = sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})
    what = f"{group}={name}" if group else f"defaults: {name}"
    text = f"{what}: there is no such file.{_nearest(name, known, own_only=True)}"
    text += f" There are {', '.join(known)}" if known else ""
    if group and not known:
        text += f" Nor is there a group {group!r}: there are {', '.join(list_groups())}"
    if group == "algorithm":
        text += f"; one function is chosen by algorithm.loss={name} or algorithm.advantage={name}"
    return text


_NO_GROUP = re.compile(r"Merge error: .* is not a subclass of (?P<kind>\w+)\. value: (?P<value>.*)")
_NO_NUMBER = re.compile(r"could not be converted to (Integer|Float)")
_DELETED = re.compile(r"Could not delete from config. '([^']+)' does not exist")
_CHOICE = re.compile(r"Could not override '(\w+)'")


def _nearest(name: str, known: list[str], *, own_only: bool = False) -> str:
    """Return the nearest of `known`; `own_only`: they are no options, which others may name."""
    other = None if own_only else find_option(name)
    if other in known:
        return f" Did you mean {other!r}, as other systems' {name.rpartition('.')[2]}?"
    by_last_part = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
    groups = sorted({k.partition(".")[0] for k in known})
    close = by_last_part or difflib.get_close_matches(name, [*groups, *known], n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def _headline(path: Path) -> str:
    with path.open() as file:
        first = file.readline()
    return first.lstrip("# ").strip() if first.startswith("#") else ""
