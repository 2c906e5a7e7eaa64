"""The folder of the shipped recipes: beside the package in a checkout, inside it once installed."""

from itertools import pairwise
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
HOME = _PACKAGE if (_PACKAGE / "recipes").is_dir() else _PACKAGE.parent
"""The folder that holds recipes/; relative paths in shipped recipes start here."""
RECIPES_DIR = HOME / "recipes"


TASKS = (
    "arithmetic",
    "countdown",
    "calculator",
    "search",
    "shapes",
    "zoom",
    "cartpole",
    "code",
)
"""Tasks of the shipped recipes for a laptop: `mcore-rl data <task>` makes data/<task>."""


def describe_making(path: str | Path) -> str:
    """Return "; ..." with the command that makes a path that is not here, if a command does."""
    parts = Path(path).parts
    if parts[-2:-1] == ("pairs",):
        return "; `mcore-rl pairs` makes it"
    task = next((b for a, b in pairwise(parts[:-1]) if a == "data" and b in TASKS), None)
    return f"; `mcore-rl data {task}` makes it" if task else ""


def resolve_shipped(path: str) -> str:
    """Return `path`, or where the package has it if it starts with recipes/ and is not here."""
    is_shipped = path.startswith("recipes/") and not Path(path).exists()
    return str(HOME / path) if is_shipped and (HOME / path).exists() else path
