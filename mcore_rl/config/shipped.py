"""The folder of the shipped recipes: beside the package in a checkout, inside it once installed."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
HOME = _PACKAGE if (_PACKAGE / "recipes").is_dir() else _PACKAGE.parent
"""The folder that holds recipes/; relative paths in shipped recipes start here."""
RECIPES_DIR = HOME / "recipes"


def resolve_shipped(path: str) -> str:
    """Return `path`, or where the package has it if it starts with recipes/ and is not here."""
    is_shipped = path.startswith("recipes/") and not Path(path).exists()
    return str(HOME / path) if is_shipped and (HOME / path).exists() else path
