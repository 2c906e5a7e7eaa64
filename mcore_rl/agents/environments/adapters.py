"""Knows the kinds of environments, and makes an environment from its kind and options.

Users name classes and functions of their own as `module:name` or `folder/file.py:name`. Nothing
here imports a package that an adapter adapts: check.py asks the worker's interpreter.
"""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from mcore_rl.process.errors import describe_error
from mcore_rl.process.user_files import import_file

ENTRY_POINTS = "mcore_rl.environments"
"""Group of entry points: packages name Adapters of their own there, as `kind = module:ADAPTER`."""
_HERE = "mcore_rl.agents.environments"


def load_named(name: str) -> Any:
    """Return what `module:name` or `file.py:name` names.

    A file's folder is added to sys.path, so that it can import its neighbors. Raises ValueError if
    there is no such file, module or name; errors of the file itself pass through.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise ValueError(f"{name!r} names nothing: write module:name or folder/file.py:name")
    module = _import_module_of_file(place) if place.endswith(".py") else _import_module(place, name)
    if not hasattr(module, attribute):
        raise ValueError(f"{place} has no {attribute!r}, which {name!r} asks for")
    return getattr(module, attribute)


def _import_module(place: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise ValueError(
                f"{sys.executable} finds no module {place!r}, which {name!r} asks for: install it "
                "there, or name a file as folder/file.py:name"
            ) from error
        raise


def _import_module_of_file(place: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {path}, which {place!r} names")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return import_file(path)


def describe_failure(error: BaseException) -> str:
    """Return one line about what a user's code raised: error, file, line and remedy."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen")
    ]
    where = f", at {frames[-1].filename} line {frames[-1].lineno}" if frames else ""
    remedy = "mend it"
    if isinstance(error, ModuleNotFoundError):
        remedy = f"install {error.name} for {sys.executable}, or name another interpreter"
    return f"{describe_error(error)}{where}; {remedy}"


@dataclass(frozen=True)
class Adapter:
    """Where the class of a kind lies.

    module, name  the class; it is called with an object of its options
    options       dataclass of its options, in the same module; its method check_imports, if any,
                  imports the code that options name; its attribute after_deadline_s, if any, is how
                  long a program's `run` may go on after its deadline, to score what was left
    modules       what the worker's interpreter must be able to import
    packages      how pip calls them
    """

    module: str
    name: str
    options: str
    modules: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    is_program: bool = False


ADAPTERS: Mapping[str, Adapter] = {
    "gymnasium": Adapter(
        f"{_HERE}.gymnasium_env",
        "GymnasiumEnvironment",
        "GymnasiumOptions",
        ("gymnasium",),
        ("gymnasium",),
    ),
    "tools": Adapter(f"{_HERE}.tools_env", "ToolsEnvironment", "ToolsOptions"),
    "code": Adapter(f"{_HERE}.code_env", "CodeEnvironment", "CodeOptions"),
    "cure": Adapter(f"{_HERE}.code_env", "CureEnvironment", "CureOptions"),
    "crop": Adapter(f"{_HERE}.crop_env", "CropEnvironment", "CropOptions", ("PIL",), ("pillow",)),
    "command": Adapter(f"{_HERE}.command", "CommandEpisode", "CommandOptions", is_program=True),
    "verifiers": Adapter(
        f"{_HERE}.verifiers_env",
        "VerifiersEpisode",
        "VerifiersOptions",
        ("verifiers.v1",),
        ("'verifiers>=0.4'",),
        is_program=True,
    ),
    "mcp": Adapter(f"{_HERE}.mcp_tools", "McpEnvironment", "McpOptions", ("mcp",), ("mcp",)),
    "openenv": Adapter(
        f"{_HERE}.openenv_env",
        "OpenEnvEnvironment",
        "OpenEnvOptions",
        ("websockets",),
        ("openenv",),
    ),
    "search_tags": Adapter(f"{_HERE}.search_env", "SearchTagsEnvironment", "SearchTagsOptions"),
    "search_tool": Adapter(f"{_HERE}.search_env", "SearchToolEnvironment", "SearchToolOptions"),
    "verl_tools": Adapter(
        f"{_HERE}.verl_env", "VerlToolsEnvironment", "VerlToolsOptions", ("verl",), ("verl",)
    ),
    "verl_interaction": Adapter(
        f"{_HERE}.verl_env",
        "VerlInteractionEnvironment",
        "VerlInteractionOptions",
        ("verl",),
        ("'verl<0.8'",),
    ),
}


def is_program(kind: str) -> bool:
    """Return whether programs run the episodes of a kind: EnvironmentPool.run, not open."""
    adapter = find_adapter(kind)
    return adapter is not None and adapter.is_program


@cache
def find_adapter(kind: str) -> Adapter | None:
    """Return the adapter of a kind: one of ADAPTERS, or of an installed package's entry point.

    None if there is none, as for a user's own class. Raises ValueError for an entry point that
    names no Adapter, or if two packages give a kind different ones.
    """
    if kind in ADAPTERS or ":" in kind:
        return ADAPTERS.get(kind)
    places = sorted({point.value for point in entry_points(group=ENTRY_POINTS, name=kind)})
    if len(places) > 1:
        raise ValueError(
            f"several packages have an environment {kind!r}: {', '.join(places)}; remove all of"
            " them but one"
        )
    adapter = load_named(places[0]) if places else None
    if adapter is not None and not isinstance(adapter, Adapter):
        raise ValueError(
            f"the entry point {kind!r} of {ENTRY_POINTS} is {places[0]}, a"
            f" {type(adapter).__name__}: it has to be an Adapter"
        )
    return adapter


def list_kinds() -> list[str]:
    """Return the names of ADAPTERS, then those of installed packages."""
    return [*ADAPTERS, *sorted(entry_points(group=ENTRY_POINTS).names - ADAPTERS.keys())]


def load(kind: str) -> tuple[Callable[[Any], Any], Callable[..., Any]]:
    """Return (what makes an environment of its options, what makes the options of keywords).

    A user's own class, named as `module:Class` or `folder/file.py:Class`, takes its options as
    keyword arguments. Raises ValueError if the kind is unknown.
    """
    if adapter := find_adapter(kind):
        return (
            load_named(f"{adapter.module}:{adapter.name}"),
            load_named(f"{adapter.module}:{adapter.options}"),
        )
    if ":" not in kind:
        raise ValueError(
            f"there is no environment of kind {kind!r}: it is one of {', '.join(list_kinds())}, or"
            " a class as module:Class or folder/file.py:Class"
        )
    cls = load_named(kind)
    _refuse_other_than_environments(kind, cls)
    return lambda keywords: cls(**keywords), dict


def check_options(kind: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError if an environment of this kind cannot have these options.

    What they name is imported, too: call it under the workers' interpreter. Errors of imported
    files pass through.
    """
    check_names(kind, options)
    _, make_options = load(kind)
    made = make_options(**options)
    if check_imports := getattr(made, "check_imports", None):
        check_imports()


def check_names(kind: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError if the kind is unknown, does not read one of the options, or lacks one."""
    _, make_options = load(kind)
    reader = make_options if find_adapter(kind) else load_named(kind)
    parameters = inspect.signature(reader).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = [parameter.name for parameter in parameters]
        if unread := sorted(set(options) - set(names)):
            raise ValueError(
                f"environment {kind!r} does not read the options {', '.join(unread)}: "
                f"it reads {', '.join(names) or 'none'}"
            )
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.name not in options
    ]
    if missing:
        raise ValueError(f"environment {kind!r} needs the options {', '.join(missing)}")


def _refuse_other_than_environments(kind: str, cls: Any) -> None:
    lacking = [name for name in ("reset", "step", "close") if not hasattr(cls, name)]
    if lacking:
        raise ValueError(f"{kind} is no environment: it has no {', '.join(lacking)}")
