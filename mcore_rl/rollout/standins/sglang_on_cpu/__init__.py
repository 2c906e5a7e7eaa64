"""What SGLang needs changed to serve well on CPU; `apply_patches()` in every one of its processes.

Each patch is one function in PATCHES, says why it is needed, and leaves what SGLang computes as it is.
"""

from collections.abc import Callable

from sglang_on_cpu.processes import fork_workers, keep_load_snapshots_in_temp_dir

PATCHES: tuple[Callable[[], None], ...] = (fork_workers, keep_load_snapshots_in_temp_dir)


def apply_patches() -> None:
    """Install every patch in this process, which must not have started an engine yet."""
    for patch in PATCHES:
        patch()
