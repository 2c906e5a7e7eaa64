"""The episodes of the benchmark of gateways: equal turns of fixed lengths."""

TURN_LEN = 100
"""Tokens that a turn adds to the prompt before the policy speaks."""


def user_text(seed: int, episode: int, turn: int) -> str:
    """Return about 400 characters, which differ between episodes and turns."""
    return f"Episode {seed}-{episode}, turn {turn}. " + "The tool has found this line. " * 13


def answer_text() -> str:
    return "The policy looks again. " * 12
