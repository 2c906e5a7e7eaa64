"""Removes secrets from text that is to be written: credentials in URLs, known secret values."""

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SHORTEST = 6
"""Hiding a shorter value would hide half of any text."""
_SHORTEST_LIKELY = 12
_WORDS = frozenset(
    {"secret", "password", "passwd", "passphrase", "apikey", "credential", "credentials"}
)
_LAST_WORDS = frozenset(
    {"key", "keys", "token", "pwd", "signature", "sig", "auth", "authorization", "webhook"}
)
"""Words that mark a secret only at the end of a name, so not in moe_token_dispatcher_type."""
_USERINFO = re.compile(r"(\b[A-Za-z][\w+.-]*://)[^\s/@'\"<>]+@")
_PARAMETER = re.compile(r"([?&;])([^\s=&;?#'\"]+)=([^\s&;#'\"]+)")
_BEARER = re.compile(r"(?i)(\bbearer\s+)[\w.~+/=-]{6,}")
_known: set[str] = set()


def remember_secret(value: str) -> None:
    """Make `redact` hide this value in all text of this process, unless it is very short."""
    if len(value) >= _SHORTEST:
        _known.add(value)


def list_secrets() -> tuple[str, ...]:
    """Return the values that `redact` hides, so that other processes of the run can hide them."""
    return tuple(sorted(_known))


def remember_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Make `redact` hide the values of environment variables whose names mark secrets."""
    for name, value in environ.items():
        if is_secret_name(name):
            remember_likely_secret(value)


def remember_likely_secret(value: str) -> None:
    """Make `redact` hide this value unless it is a word or a path.

    RAY_AUTH_MODE=disabled and SSH_AUTH_SOCK=/tmp/agent are no secrets.
    """
    if len(value) >= _SHORTEST_LIKELY and not value.startswith(("/", "~")):
        remember_secret(value)


def is_secret_name(name: str) -> bool:
    """Return whether a name belongs to a secret.

    api_key, HF_TOKEN and authToken do, num_tokens and key_file do not.
    """
    words = re.findall(r"[a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())
    return bool(words) and (words[-1] in _LAST_WORDS or not _WORDS.isdisjoint(words))


def redact(text: str) -> str:
    """Return the text with *** in place of secrets.

    Secrets are userinfo and token-like parameters of URLs, bearer tokens, and the values given to
    `remember_secret`.
    """
    for value in sorted(_known, key=len, reverse=True):
        if value in text:
            text = text.replace(value, HIDDEN)
    if "://" in text:
        text = _USERINFO.sub(rf"\1{HIDDEN}@", text)
        text = _PARAMETER.sub(_hide_secret, text)
    return _BEARER.sub(rf"\1{HIDDEN}", text)


def _hide_secret(parameter: re.Match[str]) -> str:
    separator, name, _ = parameter.groups()
    return f"{separator}{name}={HIDDEN}" if is_secret_name(name) else parameter[0]


class RedactingFormatter(logging.Formatter):
    """Formats log records without secrets, also in tracebacks."""

    def format(self, record: Any) -> str:
        return redact(super().format(record))
