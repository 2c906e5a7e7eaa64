"""Where the recipes that come with the package lie: beside it in a checkout, inside it once
installed.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
HOME = _PACKAGE if (_PACKAGE / "recipes").is_dir() else _PACKAGE.parent
"""The folder that holds recipes/; relative paths in shipped recipes start here."""
RECIPES_DIR = HOME / "recipes"
