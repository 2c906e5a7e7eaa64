"""Checks the disk: space where a run writes, what its filesystem can do, and complete models.

probe folder (hidden, removed afterwards)
  64 MiB written, synced, read back     --> rate
  a file replaced while it is read      --> every reading is a whole one
  a lock taken twice                    --> the second is refused
  a file's time beside this clock       --> the skew of a file server

A model directory needs configuration, tokenizer and every shard in its size. Hugging Face's cache
holds models and data sets, also in offline mode.
"""

import json
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.data.tokenization import default_cache_dir
from mcore_rl.process.disk import describe_filesystem
from mcore_rl.process.file_lock import LockedError, hold_lock
from mcore_rl.tools.doctor.machine.clock import LARGE_SKEW_S, SMALL_SKEW_S
from mcore_rl.tools.doctor.machine.finding import Finding, fail, ok, warn
from mcore_rl.tools.doctor.machine.needs import MachineNeeds, NamedModel
from mcore_rl.weights.hf.folder import INDEX

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TRUE = ("1", "ON", "YES", "TRUE")


def find_hub_home() -> Path:
    """Return the folder of Hugging Face's caches: $HF_HOME, or huggingface in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or str(Path(cache, "huggingface"))
    return Path(os.path.expandvars(home)).expanduser()


def is_offline() -> bool:
    """Return whether an environment variable keeps huggingface_hub off the network."""
    return any(os.environ.get(name, "").upper() in TRUE for name in OFFLINE)


def check_hub_cache(needs: MachineNeeds) -> list[Finding]:
    """Whether the cache can be read and, unless it is used offline, written."""
    home = find_hub_home()
    offline = is_offline()
    mode = "offline: only what lies there is used" if offline else "online"
    remedy = "set HF_HOME to a folder that this user can write, the same on every node"
    if not home.is_dir():
        if offline:
            text = f"{home} does not exist, and {' or '.join(OFFLINE)} keeps off the network"
            return [fail("hub cache", text, "set HF_HOME to a cache that has the models")]
        above = next(folder for folder in home.absolute().parents if folder.exists())
        if not os.access(above, os.W_OK):
            return [fail("hub cache", f"{home} cannot be made below {above}", remedy)]
        return [ok("hub cache", f"{home} will be made; {mode}")]
    if not os.access(home, os.R_OK | os.X_OK) or not (offline or os.access(home, os.W_OK)):
        return [fail("hub cache", f"{home} cannot be {'read' if offline else 'written'}", remedy)]
    return [ok("hub cache", f"{home}; {mode}")]


TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken", "tekken.json")
LARGEST_HEADER = 100 << 20
"""safetensors itself refuses longer ones."""
POINTER = b"version https://git-lfs"
CHECK = "model"


def check_models(needs: MachineNeeds) -> list[Finding]:
    """Whether the models of the recipe, or of --model, are here and whole."""
    return [finding for model in needs.models for finding in _check_model(model)]


def _check_model(model: NamedModel) -> list[Finding]:
    folder = Path(model.path)
    if folder.is_dir():
        return check_folder(folder, model.option, model.with_weights)
    if model.option == "--model" or model.path.count("/") != 1 or model.path.startswith((".", "/")):
        text = f"{model.option}={model.path}: there is no such folder"
        return [fail(CHECK, text, "check the path; on a cluster it must lie on a shared disk")]
    return _check_in_cache(model)


def _check_in_cache(model: NamedModel) -> list[Finding]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo, _, revision = model.path.partition("@")
    wanted = model.revision or revision or None
    try:
        folder = Path(snapshot_download(repo, revision=wanted, local_files_only=True))
    except LocalEntryNotFoundError:
        text = f"{model.option}={model.path} is not in Hugging Face's cache"
        if is_offline():
            remedy = f"where there is a network: hf download {repo}, then copy HF_HOME here"
            return [fail(CHECK, f"{text}, and the network is switched off", remedy)]
        return [ok(CHECK, f"{text}; a run downloads it")]
    return check_folder(folder, model.option, model.with_weights)


def check_folder(folder: Path, option: str, with_weights: bool) -> list[Finding]:
    """Return a failure for each missing or damaged file of a model, or one line with its size."""
    wrong = list(_find_wrong_small_files(folder))
    num_bytes = 0
    shards: dict[str, set[str]] = {}
    if with_weights:
        try:
            shards = _list_shards(folder)
        except ValueError as error:
            wrong.append(str(error))
        for name, tensors in shards.items():
            try:
                num_bytes += check_shard(folder / name, tensors)
            except ValueError as error:
                wrong.append(str(error))
    if wrong:
        remedy = "hf download <owner>/<name> fetches what is missing; or name another directory"
        return [fail(CHECK, f"{option}={folder}: {text}", remedy) for text in wrong]
    text = f"{option}={folder}: whole"
    text += (
        f", {len(shards)} files, {num_bytes / 2**30:.1f} GiB" if with_weights else ", no weights"
    )
    return [ok(CHECK, text, bytes=num_bytes)]


def _find_wrong_small_files(folder: Path) -> Iterator[str]:
    if not (folder / "config.json").is_file():
        yield "config.json is missing"
    else:
        try:
            json.loads((folder / "config.json").read_text())
        except ValueError as error:
            yield f"config.json is no JSON ({error})"
    if not any(path.is_file() for pattern in TOKENIZERS for path in folder.glob(pattern)):
        yield f"there is no tokenizer ({', '.join(TOKENIZERS)})"


def _list_shards(folder: Path) -> dict[str, set[str]]:
    """File -> the tensors that the index puts there; none are named if there is no index."""
    index = folder / INDEX
    if not index.is_file():
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise ValueError("there are no *.safetensors")
        return {name: set() for name in names}
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files: dict[str, set[str]] = {name: set() for name in sorted(set(weight_map.values()))}
        for tensor, name in weight_map.items():
            files[name].add(tensor)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{INDEX} cannot be read ({error!r})") from None
    return files


def check_shard(path: Path, tensors: set[str]) -> int:
    """Return the bytes of a safetensors file, which has these tensors and the size it states.

    Raises ValueError naming the file and what is wrong with it. Only its header is read.
    """
    if not path.is_file():
        raise ValueError(f"the shard {path.name} is missing")
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(POINTER))
        if start == POINTER:
            raise ValueError(f"{path.name} is a pointer of Git LFS: run git lfs pull there")
        header = _read_header(file.fileno(), num_bytes, path.name)
    stated = 8 + header[0] + _find_end_of_data(header[1], path.name)
    if stated != num_bytes:
        raise ValueError(f"{path.name} has {num_bytes} bytes, its header says {stated}")
    if absent := sorted(tensors - header[1].keys()):
        raise ValueError(f"{path.name} lacks {absent[0]}, which {INDEX} puts there")
    return num_bytes


def _read_header(file: int, num_bytes: int, name: str) -> tuple[int, Mapping[str, dict]]:
    if num_bytes < 8:
        raise ValueError(f"{name} has {num_bytes} bytes, too few for a header")
    (length,) = struct.unpack("<Q", os.pread(file, 8, 0))
    if length > min(LARGEST_HEADER, num_bytes - 8):
        raise ValueError(f"{name} has {num_bytes} bytes, its header alone would have {length}")
    try:
        return length, dict(json.loads(os.pread(file, length, 8)))
    except ValueError as error:
        raise ValueError(f"{name} has a header that is no JSON ({error})") from None


def _find_end_of_data(header: Mapping[str, dict], name: str) -> int:
    try:
        ends = [e["data_offsets"][1] for key, e in header.items() if key != "__metadata__"]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{name} has a tensor without data_offsets ({error!r})") from None
    return max(ends, default=0)


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
    existing = find_existing(needs.run_dir)
    try:
        probe = Path(tempfile.mkdtemp(prefix=PROBE_PREFIX, dir=existing))
    except OSError as error:
        text = f"cannot write into {existing}: {error.strerror}; {describe_filesystem(existing)}"
        remedy = "give this user write access, or set run.dir to a folder that it owns"
        return [fail("run folder", text, remedy)]
    try:
        checks = (check_writing, check_renaming, check_locking, check_time_of_files)
        return [check(probe) for check in checks]
    except OSError as error:
        text = f"{error.filename or existing}: {error.strerror}; {describe_filesystem(existing)}"
        return [fail("run folder", text, "repair or free the filesystem, or set another run.dir")]
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def find_existing(path: Path) -> Path:
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
                return fail("write", text, "do not use this filesystem; see the kernel's log")
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
        return warn("write", f"{text}; {describe_filesystem(probe)}", remedy, **figures)
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
        return fail("rename", text, remedy)
    return ok("rename", f"atomic, {rate:.0f} per second", renames_per_s=round(rate))


def check_locking(probe: Path) -> Finding:
    """Whether a lock that is held is refused to a second holder."""
    path = probe / "lock"
    began_s = time.monotonic()
    try:
        with hold_lock(path), hold_lock(path):
            text = f"two processes can lock one file; {describe_filesystem(probe)}"
            remedy = "two runs in one folder will not notice each other: mount it with flock"
            return warn("lock", text, remedy)
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
        return fail("clock of files", text, remedy, **figures)
    return warn("clock of files", text, remedy, **figures)


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
    places["Hugging Face cache"] = find_hub_home()
    places["token cache"] = default_cache_dir()
    found = []
    for name, path in places.items():
        wanted = _estimate_checkpoint(needs) if name == "run folder" else 0
        found.append(_judge(name, find_existing(path), wanted))
    space = read_space(find_existing(tmp))
    used = 1 - space.free_bytes / max(space.total_bytes, 1)
    if needs.object_store_mib != 0 and used > RAY_FULL:
        text = f"{tmp} is {used:.0%} full: Ray refuses to spill objects above {RAY_FULL:.0%}"
        found.append(warn("space", text, "free space there, or set TMPDIR"))
    return found


def _judge(name: str, folder: Path, wanted_bytes: int) -> Finding:
    space = read_space(folder)
    text = f"{name}: {space.free_bytes / GIB:.1f} GiB free at {folder}"
    remedy = f"free space ({describe_filesystem(folder)}), or choose another folder"
    figures = {"free_gib": round(space.free_bytes / GIB, 2)}
    if space.free_bytes < LEAST_BYTES:
        return fail("space", text, remedy, **figures)
    if wanted_bytes > space.free_bytes:
        text += f"; the checkpoints that are kept take about {wanted_bytes / GIB:.0f} GiB"
        return warn("space", text, f"{remedy}; lower checkpoint.keep", **figures)
    if space.free_bytes < FEW_BYTES:
        return warn("space", text, remedy, **figures)
    if space.free_inodes is not None and space.free_inodes < FEW_INODES:
        text += f", but only {space.free_inodes} inodes"
        return warn("space", text, "remove folders of many small files", **figures)
    return ok("space", text, **figures)


def _estimate_checkpoint(needs: MachineNeeds) -> int:
    """About what the checkpoints kept at once take, if the trained model lies in a folder here."""
    trained = [model for model in needs.models if model.option in ("model.path", "critic.path")]
    files = [path for model in trained for path in Path(model.path).glob("*.safetensors")]
    num_bytes = sum(path.stat().st_size for path in files)
    return needs.kept_checkpoints * BYTES_OF_TRAINING * num_bytes
