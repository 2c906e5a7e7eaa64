"""Reads how much space is left where a run writes: its folder, temporary files, caches."""

import os
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.data.token_cache import default_cache_dir
from mcore_rl.process.disk import describe_filesystem
from mcore_rl.tools.doctor.machine.finding import Finding, failed, ok, warning
from mcore_rl.tools.doctor.machine.folder import existing_part
from mcore_rl.tools.doctor.machine.hub_cache import hub_home
from mcore_rl.tools.doctor.machine.needs import MachineNeeds

GIB = 2**30
LEAST_BYTES = GIB
FEW_BYTES = 10 * GIB
FEW_INODES = 10_000
BYTES_OF_TRAINING = 7
"""A checkpoint's bytes by those of the weights: bfloat16 weights, float32 master and moments."""
RAY_FULL = 0.95
"""Ray stops writing to a filesystem that is fuller (local_fs_capacity_threshold)."""


@dataclass(frozen=True)
class Space:
    """A filesystem's free and total bytes, and its free inodes (None: it has no bound)."""

    free_bytes: int
    total_bytes: int
    free_inodes: int | None


def read_space(folder: Path) -> Space:
    stats = os.statvfs(folder)
    inodes = stats.f_favail if stats.f_files else None
    return Space(stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize, inodes)


def check_space(needs: MachineNeeds) -> list[Finding]:
    """Whether the run folder, /tmp and the caches have room."""
    tmp = Path(os.environ.get("TMPDIR", "/tmp"))
    places = {"run folder": needs.run_dir, "temporary files": tmp}
    places["Hugging Face cache"] = hub_home()
    places["token cache"] = default_cache_dir()
    found = []
    for name, path in places.items():
        wanted = _checkpoint_bytes(needs) if name == "run folder" else 0
        found.append(_judge(name, existing_part(path), wanted))
    space = read_space(existing_part(tmp))
    used = 1 - space.free_bytes / max(space.total_bytes, 1)
    if needs.object_store_mib != 0 and used > RAY_FULL:
        text = f"{tmp} is {used:.0%} full: Ray refuses to spill objects above {RAY_FULL:.0%}"
        found.append(warning("space", text, "free space there, or set TMPDIR"))
    return found


def _judge(name: str, folder: Path, wanted_bytes: int) -> Finding:
    space = read_space(folder)
    text = f"{name}: {space.free_bytes / GIB:.1f} GiB free at {folder}"
    remedy = f"free space ({describe_filesystem(folder)}), or choose another folder"
    figures = {"free_gib": round(space.free_bytes / GIB, 2)}
    if space.free_bytes < LEAST_BYTES:
        return failed("space", text, remedy, **figures)
    if wanted_bytes > space.free_bytes:
        text += f"; the checkpoints that are kept take about {wanted_bytes / GIB:.0f} GiB"
        return warning("space", text, f"{remedy}; lower checkpoint.keep", **figures)
    if space.free_bytes < FEW_BYTES:
        return warning("space", text, remedy, **figures)
    if space.free_inodes is not None and space.free_inodes < FEW_INODES:
        text += f", but only {space.free_inodes} inodes"
        return warning("space", text, "remove folders of many small files", **figures)
    return ok("space", text, **figures)


def _checkpoint_bytes(needs: MachineNeeds) -> int:
    """About what the checkpoints kept at once take, if the trained model lies in a folder here."""
    trained = [model for model in needs.models if model.option in ("model.path", "critic.path")]
    files = [path for model in trained for path in Path(model.path).glob("*.safetensors")]
    num_bytes = sum(path.stat().st_size for path in files)
    return needs.kept_checkpoints * BYTES_OF_TRAINING * num_bytes
