"""The addresses of the servers that a run starts beside its collectors.

collector --starts--> sandbox, search
    |  MCORE_RL_SANDBOX_URL, MCORE_RL_SEARCH_URL
    v
reward functions, workers of environments, programs of agents
"""

import os
from collections.abc import Mapping
from urllib.parse import urlsplit, urlunsplit

SANDBOX_URL = "MCORE_RL_SANDBOX_URL"
SEARCH_URL = "MCORE_RL_SEARCH_URL"


def sandbox_url() -> str:
    """Return the address of the run's sandbox, /run_code and key included; empty: it has none."""
    return os.environ.get(SANDBOX_URL, "")


def search_url() -> str:
    """Return the address of the run's search, /retrieve and key included; empty: it has none."""
    return os.environ.get(SEARCH_URL, "")


def publish(urls: Mapping[str, str]) -> None:
    """Tell this process, and those that it starts from now on, the addresses by variable."""
    os.environ.update(urls)


def withdraw(urls: Mapping[str, str]) -> None:
    """Undo `publish`, unless another address stands there by now."""
    for name, url in urls.items():
        if os.environ.get(name) == url:
            del os.environ[name]


def split_key(url: str) -> tuple[str, str]:
    """Return (the address without user and password, the password, or an empty text)."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=host)), parts.password or ""
