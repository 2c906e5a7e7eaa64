"""The recipes for many GPUs, by name."""

from mcore_rl.recipe import list_recipes

LARGE = [name for name in list_recipes() if not name.startswith("tiny_")]
