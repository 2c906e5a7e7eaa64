"""Finds reward files that set handlers of signals, which Python allows in main threads only."""

import ast

from mcore_rl.rewards.user_function import find_file

CALLS = ("alarm", "setitimer", "signal", "siginterrupt", "set_wakeup_fd")
"""Functions of the module `signal` that need the main thread, or whose handlers do."""


def refuse_signals(path: str, name: str, takes_all: bool) -> None:
    """Raise ValueError if a reward file uses signals: collectors call functions in other threads.

    path        reward.path, a file that was imported before
    takes_all   the function takes all samples at once, which workers do not do
    """
    tree = ast.parse(find_file("reward.path", path).read_bytes())
    found = _find_uses(tree)
    if not found:
        return
    line, use = found[0]
    remedy = "set reward.workers=1 or more, whose processes call it in their main thread"
    if takes_all:
        remedy = f"write {name} for one sample (docs/rewards.md), and {remedy}"
    raise ValueError(
        f"reward.path={path} line {line} uses {use}, which works in a main thread only, and with"
        f" reward.workers=0 (or run.debug=true) another thread calls {name}: {remedy}"
    )


def _find_uses(tree: ast.Module) -> list[tuple[int, str]]:
    """Return (line, name) of each use of CALLS, by line."""
    modules: set[str] = set()
    functions: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {name.asname or name.name for name in node.names if name.name == "signal"}
        if isinstance(node, ast.ImportFrom) and node.module == "signal":
            functions |= {name.asname or name.name for name in node.names if name.name in CALLS}
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in modules and node.attr in CALLS:
                found.append((node.lineno, f"{node.value.id}.{node.attr}"))
        elif isinstance(node, ast.Name) and node.id in functions:
            found.append((node.lineno, node.id))
    return sorted(found)
