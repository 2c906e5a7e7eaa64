"""`mcore-rl options`: shows and searches all options of a recipe; writes docs/options.md.

mcore_rl/config/*.py   types, bounds, defaults, the text under each field  --+
                                                                             +--> Option
recipes/*.yaml         the values that shipped recipes give                --+
"""

import argparse
import ast
import difflib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from omegaconf import DictConfig, OmegaConf

from mcore_rl.config import Config
from mcore_rl.config.bounds import Bounds, Choices, Options, Range, is_group, options_of
from mcore_rl.config.recipe import list_recipes
from mcore_rl.config.shipped import RECIPES_DIR
from mcore_rl.config.tree import leaves_under, spell

WIDTH = 100
PAGE_WIDTH = 120
MOST_NAMED = 3
"""Recipes that the page names for an option; of more, it gives the number."""


@dataclass(frozen=True)
class Option:
    """A leaf of the tree, or, with [] in its name, an option of each element of a list.

    type           such as "int | null"
    values         what it may be: "at least 1", "one of sync, async"; empty: anything of its type
    default        as a recipe spells it
    recipes        shipped recipe -> the value that it gives
    """

    name: str
    type: str
    values: str
    default: str
    description: str
    recipes: Mapping[str, str]

    @property
    def group(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def takes(self) -> str:
        """Return the type and the values in words."""
        if self.values.startswith("one of"):
            return self.values + (", or null" if "null" in self.type else "")
        return f"{self.type}, {self.values}" if self.values else self.type


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    command.description = "list options with type, bounds, default, description and recipes"
    text = "words, all of which begin a word of the option's name or of its description"
    command.add_argument("words", nargs="*", metavar="word", help=text)
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a JSON list of objects")
    form.add_argument("--markdown", action="store_true", help="the page docs/options.md")
    command.set_defaults(run=print_options)


def print_options(args: argparse.Namespace) -> None:
    """Print the options that have the words. Raises ValueError if there are none."""
    options = list_options()
    found = [option for option in options if _matches(option, args.words)]
    if not found:
        names = {part for option in options for part in re.split(r"[._]", option.name)}
        close = difflib.get_close_matches(args.words[0], names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{' '.join(args.words)}: no option has this in name or text.{hint}")
    if args.json:
        print(json.dumps([asdict(option) for option in found], indent=2))
    elif args.markdown:
        print(make_page(found), end="")
    else:
        print("\n".join(_format_text(option) for option in found))


@cache
def list_options() -> list[Option]:
    """Return all options of a recipe, in the order of the tree; made once in a process."""
    recipes = {name: read_settings(RECIPES_DIR / f"{name}.yaml") for name in list_recipes()}
    return [
        Option(
            name,
            _name_type(kind),
            _explain_bounds(bounds),
            spell(default),
            description,
            {recipe: spell(values[name]) for recipe, values in recipes.items() if name in values},
        )
        for name, kind, bounds, default, description in _walk(Config())
    ]


def _walk(
    defaults: Options, prefix: str = ""
) -> Iterator[tuple[str, Any, Bounds | None, Any, str]]:
    """Yield name, type, bounds, default and description of each option, of groups within last."""
    texts = read_descriptions(type(defaults))
    for name, (kind, bounds) in options_of(type(defaults)).items():
        if is_group(kind):
            continue
        yield f"{prefix}{name}", kind, bounds, getattr(defaults, name), texts.get(name, "")
        if get_origin(kind) is list and is_group(element := get_args(kind)[0]):
            yield from _walk(element(), f"{prefix}{name}[].")
    for name, (kind, _) in options_of(type(defaults)).items():
        if is_group(kind):
            yield from _walk(getattr(defaults, name), f"{prefix}{name}.")


@cache
def read_descriptions(cls: type) -> dict[str, str]:
    """Return the texts that stand under the fields of a configuration class, by field."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not issubclass(base, Options) or base is Options:
            continue
        body = _parse(base).body
        for field, following in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(following, ast.Expr):
                text = " ".join(str(ast.literal_eval(following.value)).split())
                texts[ast.unparse(field.target)] = re.sub(r"\bNone\b", "null", text)
    return texts


def _parse(cls: type) -> ast.ClassDef:
    [node] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    return node


def _name_type(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(map(_name_type, get_args(kind)))
    if get_origin(kind) is list:
        return f"list of {_name_type(get_args(kind)[0])}"
    if get_origin(kind) is dict or is_group(kind):
        return "mapping"
    if kind is type(None):
        return "null"
    return "text" if kind is str else str(kind.__name__)


def _explain_bounds(bounds: Bounds | None) -> str:
    if isinstance(bounds, Choices):
        return f"one of {', '.join(map(spell, bounds.values))}"
    if isinstance(bounds, Range):
        return re.sub(r"^must (be |lie )?", "", str(bounds))
    return ""


def read_settings(path: Path) -> dict[str, Any]:
    """Return the options that a recipe file, or a file in its defaults list, sets, by name."""
    tree: Any = OmegaConf.to_container(_merge_files(path), resolve=False)
    return dict(_flatten(tree, ""))


def _merge_files(path: Path) -> DictConfig:
    """Return what a recipe file says on top of the files in its defaults list."""
    own = OmegaConf.load(path)
    assert isinstance(own, DictConfig)
    entries = own.pop("defaults", [])
    files = []
    for entry in entries:
        if isinstance(entry, Mapping | DictConfig):
            files += [path.parent / str(folder) / f"{name}.yaml" for folder, name in entry.items()]
        elif entry not in ("schema", "_self_"):
            files.append(path.parent / f"{entry}.yaml")
    tree = OmegaConf.create({})
    for file in files:
        part = _merge_files(file)
        is_global = file.parent == RECIPES_DIR or "@package _global_" in file.read_text()
        tree = OmegaConf.merge(tree, part if is_global else {file.parent.name: part})
    merged = OmegaConf.merge(tree, own)
    assert isinstance(merged, DictConfig)
    return merged


def _flatten(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield options with their values; one with free names inside is a value itself."""
    for name, value in values.items():
        dotted = f"{prefix}{name}"
        if not isinstance(value, Mapping):
            yield dotted, value
        elif dotted in _list_leaves():
            yield dotted, {key: inner for key, inner in value.items() if inner is not None}
        else:
            yield from _flatten(value, f"{dotted}.")


@cache
def _list_leaves() -> frozenset[str]:
    return frozenset(leaves_under(Config))


def _matches(option: Option, words: Sequence[str]) -> bool:
    text = f"{option.name} {option.values} {option.description}".lower()
    return all(re.search(rf"(?<![a-z0-9]){re.escape(word.lower())}", text) for word in words)


def _format_text(option: Option) -> str:
    head = f"{option.name} = {option.default}  ({option.takes})"
    lines = [head, *textwrap.wrap(option.description, WIDTH - 4)]
    if option.recipes:
        given = ", ".join(f"{recipe} {value}" for recipe, value in option.recipes.items())
        lines += textwrap.wrap(f"recipes: {given}", WIDTH - 4)
    return "\n    ".join(lines)


def make_page(options: Sequence[Option]) -> str:
    """Return the options as a page of the documentation."""
    lines = [
        "# Options of a recipe",
        "",
        "`mcore-rl options` prints and searches this list: `mcore-rl options kl`, `mcore-rl options"
        " timeout --json`. It is",
        "generated from `mcore_rl/config/` by `make options-doc`. A recipe's file and the command"
        " line set options by these",
        "names ([recipes.md](recipes.md)).",
    ]
    for group in dict.fromkeys(option.group for option in options):
        lines += ["", f"## {group or 'The whole recipe'}", ""]
        for option in options:
            lines += _format_item(option) if option.group == group else []
    return "\n".join(lines) + "\n"


def _format_item(option: Option) -> list[str]:
    text = f"({option.takes}) {option.description} {_mention_recipes(option.recipes)}"
    text = re.sub(r"([<*])", r"\\\1", text)
    text = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)
    head = f"* `{option.name}={option.default}` "
    return textwrap.wrap(
        head + text,
        PAGE_WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _mention_recipes(recipes: Mapping[str, str]) -> str:
    if len(recipes) > MOST_NAMED:
        return f"Set by {len(recipes)} recipes."
    named = ", ".join(f"{recipe}: `{value}`" for recipe, value in recipes.items())
    return f"Recipes: {named}." if recipes else ""
