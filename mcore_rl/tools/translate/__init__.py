"""Recipes made of another system's configuration, with a list of what has no counterpart here."""
