"""Knows the kinds of environments, and makes an environment from its kind and options.

Nothing here imports a package that an adapter adapts: check.py asks the worker's interpreter.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.environments.loading import load_named

_HERE = "mcore_rl.agents.environments"


@dataclass(frozen=True)
class Adapter:
    """Where the class of a kind lies.

    module, name  the class; it is called with an object of its options
    options       dataclass of its options, in the same module; its method check_imports, if any,
                  imports the code that options name
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
    "cure": Adapter(f"{_HERE}.cure_env", "CureEnvironment", "CureOptions"),
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
    "search_tags": Adapter(f"{_HERE}.search_tags", "SearchTagsEnvironment", "SearchTagsOptions"),
    "search_tool": Adapter(f"{_HERE}.search_tool", "SearchToolEnvironment", "SearchToolOptions"),
    "verl_tools": Adapter(
        f"{_HERE}.verl_tools", "VerlToolsEnvironment", "VerlToolsOptions", ("verl",), ("verl",)
    ),
    "verl_interaction": Adapter(
        f"{_HERE}.verl_interaction",
        "VerlInteractionEnvironment",
        "VerlInteractionOptions",
        ("verl",),
        ("'verl<0.8'",),
    ),
}


def is_program(kind: str) -> bool:
    """Return whether programs play the episodes of a kind: EnvironmentPool.run, not open."""
    return kind in ADAPTERS and ADAPTERS[kind].is_program


def load(kind: str) -> tuple[Callable[[Any], Any], Callable[..., Any]]:
    """Return (what makes an environment of its options, what makes the options of keywords).

    A user's own class, named as `module:Class` or `folder/file.py:Class`, takes its options as
    keyword arguments. Raises ValueError if the kind is unknown.
    """
    if adapter := ADAPTERS.get(kind):
        return (
            load_named(f"{adapter.module}:{adapter.name}"),
            load_named(f"{adapter.module}:{adapter.options}"),
        )
    if ":" not in kind:
        raise ValueError(
            f"there is no environment of kind {kind!r}: it is one of {', '.join(ADAPTERS)}, or a "
            "class as module:Class or folder/file.py:Class"
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
    reader = make_options if kind in ADAPTERS else load_named(kind)
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
