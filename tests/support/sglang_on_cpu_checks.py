"""Runs the checks of the stand-ins and of every SGLang patch, in a process with them on its path.

The check of a patch is the function check_<name of the patch>. It first shows what SGLang does
without the patch, so that it fails once SGLang no longer needs it. Output: one JSON object that
maps the name of each check to its traceback, "" if it passed.
"""

# pyright: reportMissingImports=false

import json
import sys
import traceback
from collections.abc import Callable

from tests.support import (
    sglang_attention_checks,
    sglang_delta_net_checks,
    sglang_draft_checks,
    sglang_kernel_checks,
    sglang_mamba_checks,
    sglang_native_checks,
    sglang_process_checks,
    sglang_sparse_checks,
)

MODULES = (
    sglang_attention_checks,
    sglang_process_checks,
    sglang_kernel_checks,
    sglang_delta_net_checks,
    sglang_mamba_checks,
    sglang_native_checks,
    sglang_draft_checks,
    sglang_sparse_checks,
)


def checks() -> dict[str, Callable[[], None]]:
    """Return the checks by name, in the order in which they have to run."""
    found = {
        name: value
        for module in MODULES
        for name, value in vars(module).items()
        if name.startswith("check_")
    }
    return {**found, "check_every_patch_has_a_check": check_every_patch_has_a_check}


def check_every_patch_has_a_check() -> None:
    from sglang_on_cpu import PATCHES

    missing = {f"check_{patch.__name__}" for patch in PATCHES} - checks().keys()
    assert not missing, f"sglang_on_cpu.PATCHES without a check: {missing}"


if __name__ == "__main__":
    results = {}
    for name, check in checks().items():
        try:
            check()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    sys.stdout.write("\n" + json.dumps(results))
