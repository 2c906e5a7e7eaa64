"""The recipes for many GPUs, by name, and what `mcore-rl plan` says of each."""

import functools
import io
import json
from contextlib import redirect_stdout
from typing import Any

from mcore_rl.cli import main
from mcore_rl.config.recipe import list_recipes

LARGE = [name for name in list_recipes() if not name.startswith("tiny_")]


@functools.cache
def plan_of(recipe: str) -> dict[str, Any]:
    """Return that of the recipe as it is shipped; made once for all tests, which only read it."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["plan", f"recipe={recipe}", "--json"]) == 0
    return json.loads(out.getvalue())
