"""Converts verl, slime or NeMo-RL options into a recipe, and lists what has no counterpart."""
