"""Versions of the packages that are installed; others are left out."""

import importlib.metadata

from mcore_rl.process.versions import CORE, find_versions


def test_versions_come_by_normalized_names_of_what_is_installed() -> None:
    found = find_versions(("Torch", "megatron_core", "no-such-package"))
    assert found == {
        "torch": importlib.metadata.version("torch"),
        "megatron-core": importlib.metadata.version("megatron-core"),
    }
    assert {"torch", "sglang", "megatron-core", "ray"} <= set(find_versions()) <= set(CORE)
