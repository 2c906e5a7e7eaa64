"""Has Ray processes of a test share a token of their own."""

import secrets
from pathlib import Path

import pytest


def set_ray_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a token into `folder`, which all Ray processes of this test and its children use."""
    token = folder / "token"
    token.write_text(secrets.token_hex(16))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
