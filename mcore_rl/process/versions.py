"""Finds which versions of named packages are installed."""

import importlib.metadata as metadata
from collections.abc import Sequence

from packaging.utils import canonicalize_name

CORE = ("torch", "sglang", "megatron-core", "transformer-engine", "ray", "transformers")
"""The packages that must fit one another."""


def find_versions(names: Sequence[str] = CORE) -> dict[str, str]:
    """Return normalized name -> version of the installed packages among `names`."""
    found = {}
    for name in names:
        try:
            found[str(canonicalize_name(name))] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
