"""Bounds of the texts that end a response, for whoever takes them from a client."""

MOST_STOPS = 32
MOST_STOP_LEN = 1024
"""Characters of one text."""
