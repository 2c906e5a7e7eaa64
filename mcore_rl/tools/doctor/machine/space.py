"""Reads how much space is left where a run writes: its folder, temporary files, caches.

Tries on the run folder's filesystem what runs do there: write, rename, fsync, lock.

probe folder (hidden, removed afterwards)
  64 MiB written, synced, read back     --> rate
  a file replaced while it is read      --> every reading is a whole one
  a lock taken twice                    --> the second is refused
  a file's time beside this clock       --> the skew of a file server
"""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.data.tokenization import default_cache_dir
from mcore_rl.process.disk import describe_filesystem
from mcore_rl.process.file_lock import LockedError, hold_lock
from mcore_rl.tools.doctor.machine.clock import LARGE_SKEW_S, SMALL_SKEW_S
from mcore_rl.tools.doctor.machine.finding import Finding, failed, ok, warning
from mcore_rl.tools.doctor.machine.model_files import hub_home
from mcore_rl.tools.doctor.machine.needs import MachineNeeds

PROBE_PREFIX = ".mcore_rl_doctor_"
PROBE_BYTES = 64 << 20
RENAMES = 200
SYNCS = 10
SLOW_MIB_PER_S = 30.0
SLOW_SYNC_S = 0.25
COARSE_S = 0.1
"""Filesystems stamp files with a clock that ticks every few milliseconds, some every second."""


def check_run_folder(needs: MachineNeeds) -> list[Finding]:
    """Whether the run folder can be written, and its filesystem keeps the promises of one."""
    existing = existing_part(needs.run_dir)
    try:
        probe = Path(tempfile.mkdtemp(prefix=PROBE_PREFIX, dir=existing))
    except OSError as error:
        text = f"cannot write into {existing}: {error.strerror}; {describe_filesystem(existing)}"
        remedy = "give this user write access, or set run.dir to a folder that it owns"
        return [failed("run folder", text, remedy)]
    try:
        checks = (check_writing, check_renaming, check_locking, check_time_of_files)
        return [check(probe) for check in checks]
    except OSError as error:
        text = f"{error.filename or existing}: {error.strerror}; {describe_filesystem(existing)}"
        return [failed("run folder", text, "repair or free the filesystem, or set another run.dir")]
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def existing_part(path: Path) -> Path:
    """Return the folder itself, or the nearest one above it that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def check_writing(probe: Path) -> Finding:
    """Whether written bytes come back, and how fast they are on disk."""
    path = probe / "bytes"
    chunk = os.urandom(1 << 20)
    began_s = time.monotonic()
    with path.open("wb") as file:
        for _ in range(PROBE_BYTES // len(chunk)):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    mib_per_s = PROBE_BYTES / 2**20 / (time.monotonic() - began_s)
    with path.open("rb") as file:
        while content := file.read(len(chunk)):
            if content != chunk:
                text = f"{path} does not hold what was written"
                return failed("write", text, "do not use this filesystem; see the kernel's log")
    began_s = time.monotonic()
    with path.open("r+b") as file:
        for number in range(SYNCS):
            os.pwrite(file.fileno(), bytes([number]), 0)
            os.fsync(file.fileno())
    sync_s = (time.monotonic() - began_s) / SYNCS
    path.unlink()
    text = f"{mib_per_s:.0f} MiB/s written and synced, {sync_s * 1000:.1f} ms per fsync"
    figures = {"mib_per_s": round(mib_per_s, 1), "fsync_ms": round(sync_s * 1000, 2)}
    if mib_per_s < SLOW_MIB_PER_S or sync_s > SLOW_SYNC_S:
        remedy = "checkpoints will be slow: set run.dir to a faster filesystem"
        return warning("write", f"{text}; {describe_filesystem(probe)}", remedy, **figures)
    return ok("write", text, **figures)


def check_renaming(probe: Path) -> Finding:
    """Whether a file that is replaced by a rename is whole for whoever reads it meanwhile."""
    target, wrong = probe / "renamed", list[str]()
    contents = [bytes([number]) * 65536 for number in (1, 2)]
    target.write_bytes(contents[0])
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                content = target.read_bytes()
            except OSError as error:
                wrong.append(f"it could not be read ({error.strerror})")
                return
            if content not in contents:
                wrong.append(f"a reading had {len(content)} bytes of two versions")
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    began_s = time.monotonic()
    for number in range(RENAMES):
        part = probe / "part"
        part.write_bytes(contents[number % 2])
        part.replace(target)
    rate = RENAMES / (time.monotonic() - began_s)
    done.set()
    reader.join(timeout=10)
    if wrong:
        text = f"while a file was replaced, {wrong[0]}; {describe_filesystem(probe)}"
        remedy = "checkpoints may be read half-written: set run.dir to another filesystem"
        return failed("rename", text, remedy)
    return ok("rename", f"atomic, {rate:.0f} per second", renames_per_s=round(rate))


def check_locking(probe: Path) -> Finding:
    """Whether a lock that is held is refused to a second holder."""
    path = probe / "lock"
    began_s = time.monotonic()
    try:
        with hold_lock(path), hold_lock(path):
            text = f"two processes can lock one file; {describe_filesystem(probe)}"
            remedy = "two runs in one folder will not notice each other: mount it with flock"
            return warning("lock", text, remedy)
    except LockedError:
        seconds = time.monotonic() - began_s
    return ok("lock", "flock refuses a second holder", lock_ms=round(seconds * 1000, 2))


def check_time_of_files(probe: Path, clock: Callable[[], float] = time.time) -> Finding:
    """Whether a file that is written now is dated now: a file server dates it by its own clock."""
    path = probe / "dated"
    before_s = clock()
    path.write_bytes(b"now")
    after_s = clock()
    dated_s = path.stat().st_mtime
    # A stamp may be rounded down to the second.
    skew_s = min(0.0, dated_s + 1 - before_s) + max(0.0, dated_s - COARSE_S - after_s)
    figures = {"skew_s": round(skew_s, 3)}
    if abs(skew_s) <= SMALL_SKEW_S:
        return ok("clock of files", "files are dated by a clock like this one", **figures)
    text = f"a file written now is dated {skew_s:+.1f} s beside this machine's clock"
    remedy = "let an NTP client (chrony) set the clocks of this machine and of the file server"
    if abs(skew_s) > LARGE_SKEW_S:
        return failed("clock of files", text, remedy, **figures)
    return warning("clock of files", text, remedy, **figures)


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
