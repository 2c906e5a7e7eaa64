"""Writes files whole, and explains a full disk or a refused file in one line with the remedy.

A DiskFullError names the file, the filesystem and the free space. A refusal names the file and the
user.
"""

import ctypes
import errno
import getpass
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def is_refused(error: OSError) -> bool:
    """Return whether `error` says that this user may not read, write or make a file."""
    return error.errno in _REFUSED


def explain_refusal(error: ValueError | OSError) -> str:
    """Return which file this user may not use, and the remedy; the text of any other error."""
    if not (isinstance(error, OSError) and is_refused(error)):
        return str(error)
    name = str(error) if error.filename is None else os.fsdecode(error.filename)
    if error.errno == errno.EROFS:
        return f"{name}: its filesystem is read-only; name another folder to write to"
    return (
        f"{name}: no permission for user {name_user()}; have its owner give it (chmod), or name"
        " another"
    )


def check_readable(path: Path) -> None:
    """Raise the OSError of opening `path` before a library raises a less clear error."""
    with path.open("rb"):
        pass


def name_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an id that no file lists
        return str(os.getuid())


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EINTR)
_FAILING = (errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ENODEV, errno.ETIMEDOUT)
_CANNOT_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of filesystems without fsync, or without fsync of folders."""
PART = ".part"
"""Suffix of a file that is not complete yet."""
DELETED = ".deleted"
"""Suffix of a folder that no longer counts and is being deleted."""
_FULL_BYTES = 1 << 20
"""A filesystem with less free space counts as full if the error names no file."""
_NO_SPACE_TEXT = re.compile(
    r"[Nn]o space left on device|Disk quota exceeded|disk quota is used up|os error (28|122)\b"
)
"""How libraries without errno (safetensors, torch's file writer) report the same error, and how
describe_full_disk does, whose text megatron-core's writer puts into an error of its own."""


class UnwritableError(RuntimeError):
    """A file of the run cannot be written. The message names the file and the reason."""


class DiskFullError(UnwritableError):
    """No space was left for a file of the run. The message names file, filesystem and remedy."""


@contextmanager
def report_unwritable(path: str | Path) -> Iterator[None]:
    """Raise UnwritableError naming `path` if the block fails as its filesystem takes no file.

    That is a full disk (DiskFullError), a folder that this user may not write to or that is
    read-only, or a disk or file server that fails. Any other error passes through.
    """
    try:
        with report_full_disk(path):
            yield
    except OSError as error:
        if error.errno not in (*_REFUSED, *_FAILING):
            raise
        raise UnwritableError(f"cannot write {path}: {explain_refusal(error)}") from error


@contextmanager
def report_full_disk(path: str | Path) -> Iterator[None]:
    """Raise DiskFullError naming `path` if the block fails because the disk is full or over quota.

    `path` is the file or folder that the block writes. Any other error passes through.
    """
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:  # Only errors that report a full disk are replaced.
        if not is_disk_full(error):
            raise
        raise DiskFullError(describe_full_disk(path, error)) from error


@contextmanager
def report_any_full_disk() -> Iterator[None]:
    """Raise DiskFullError if the block fails because of a full disk and has not said so itself.

    The block is all that a process does. The message names the file if the error names one, and
    otherwise a full filesystem. Buffered output is flushed before the block ends.
    """
    try:
        yield
        _flush_output()
    except DiskFullError:
        raise
    except Exception as error:  # Only errors that report a full disk are replaced.
        if not is_disk_full(error):
            raise
        raise name_full_disk(error) from error


def _flush_output() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the flush at exit
        raise


def write_whole(path: Path, content: str | bytes, *, lasting: bool = False) -> None:
    """Write a file atomically; create its folder if it is missing.

    lasting   force it to the disk, so that it survives a crash of the machine

    Raises DiskFullError if the disk is full; an earlier file of that name then remains.
    """
    part = path.with_name(path.name + PART)
    with report_full_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if isinstance(content, str):
                part.write_text(content)
            else:
                part.write_bytes(content)
            if lasting:
                force(part)
            part.replace(path)
            if lasting:
                force(path.parent)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def name_full_disk(error: BaseException) -> DiskFullError:
    """Return a DiskFullError for any error that reports a full disk."""
    if isinstance(error, DiskFullError):
        return error
    named = (getattr(each, "filename", None) for each in iter_chain(error))
    path = next((name for name in named if isinstance(name, str)), None)
    if path is not None:
        return DiskFullError(describe_full_disk(path, error))
    full = [folder for folder in _list_written_folders() if _is_full(folder)] or [os.getcwd()]
    described = describe_full_disk(full[0], error, "a file below ")
    text = str(error).strip() or type(error).__name__
    # Several lines may name an engine and the end of its log.
    return DiskFullError(f"{text}\n{described}" if "\n" in text else f"{described} ({text})")


def reserve_space(descriptor: int, num_bytes: int) -> None:
    """Set a file's length to `num_bytes` and reserve the space, if the filesystem can.

    The file keeps its content. Raises OSError (ENOSPC, EDQUOT) if there is too little space.
    os.posix_fallocate would write every block on a filesystem that cannot reserve space.
    """
    os.truncate(descriptor, num_bytes)
    if num_bytes == 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) != 0:
        error = ctypes.get_errno()
        if error not in _CANNOT_RESERVE:
            raise OSError(error, os.strerror(error))


def rename_whole(folder: Path, target: Path) -> None:
    """Force all files of a folder to the disk and rename the folder to `target`.

    A folder `target` that exists is replaced. If the machine crashes meanwhile, `target` is the old
    folder or the complete new one.
    """
    force_to_disk(folder)
    former = target.with_name(target.name + DELETED)
    shutil.rmtree(former, ignore_errors=True)
    if target.exists():
        target.rename(former)
    folder.rename(target)
    force(target.parent)
    shutil.rmtree(former, ignore_errors=True)


def force_to_disk(folder: Path) -> None:
    """Force a folder and all files and folders in it to the disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file() or path.is_dir():
            force(path)
    force(folder)


def make_lasting(folder: Path) -> None:
    """Make a folder, and those above that are missing, so that a crash leaves none of them out."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True)
    for each in missing:
        force(each.parent)


def force(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def is_disk_full(error: BaseException) -> bool:
    """Return whether `error`, or an error it was raised from, reports a full disk or quota."""
    return any(
        each.errno in _NO_SPACE
        if isinstance(each, OSError) and each.errno
        else _NO_SPACE_TEXT.search(_read_text(each)) is not None
        for each in iter_chain(error)
    )


def _read_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # of an exception of the user's
        return ""


def iter_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause of the cause, and so on."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__


def describe_full_disk(path: str | Path, error: BaseException, what: str = "") -> str:
    """Return one line with the file, its filesystem, the free space, and what to do.

    `what` is put before a path that is only a folder above the file.
    """
    is_quota = any(isinstance(e, OSError) and e.errno == errno.EDQUOT for e in iter_chain(error))
    reason = "the disk quota is used up" if is_quota else "no space left on device"
    return (
        f"cannot write {what}{path}: {reason}; {describe_filesystem(Path(path).absolute())}. Free"
        " some space (old checkpoints and runs, checkpoint.keep) or write to another filesystem,"
        " then run the same command again; a training run continues from its newest checkpoint"
    )


def explain_loss(path: str | Path, error: OSError) -> str:
    """Return why a log can no longer be written, and for a full disk what to do."""
    return describe_full_disk(path, error) if is_disk_full(error) else f"{path}: {error}"


def _list_written_folders() -> Iterator[str]:
    """Yield paths that this process may have written to: its output, and the usual folders for
    temporary files, caches and results.
    """
    for descriptor in (1, 2):
        path = os.path.realpath(f"/proc/self/fd/{descriptor}")
        if os.path.isfile(path):
            yield path
    yield from (os.getcwd(), tempfile.gettempdir(), "/dev/shm", os.path.expanduser("~"))


def _is_full(path: str) -> bool:
    try:
        stats = os.statvfs(path)
    except OSError:
        return False
    has_no_inode = bool(stats.f_files) and not stats.f_favail
    return has_no_inode or stats.f_bavail * stats.f_frsize < _FULL_BYTES


def describe_filesystem(path: Path) -> str:
    """Return the name of the filesystem that holds `path`, and its free space; never raises."""
    existing = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
    mount_point = _find_mount_point(existing)
    kind = _read_filesystem_type(mount_point)
    try:
        stats = os.statvfs(existing)
    except OSError as error:
        return f"its filesystem {mount_point}{kind} does not say how much is free ({error})"
    free_bytes = stats.f_bavail * stats.f_frsize
    total_bytes = stats.f_blocks * stats.f_frsize
    inodes = ""
    if stats.f_files and not stats.f_favail:
        inodes = " and no inode"  # many small files can fill a filesystem that has bytes left
    free = f"{_format_size(free_bytes)} of {_format_size(total_bytes)}{inodes} free"
    return f"its filesystem {mount_point}{kind} has {free}"


def _format_size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def _find_mount_point(path: Path) -> Path:
    path = path.resolve()
    while not path.is_mount() and path != path.parent:
        path = path.parent
    return path


def _read_filesystem_type(mount_point: Path) -> str:
    """Return " (type)" from /proc/self/mounts, or "" if it is not listed there."""
    try:
        lines = Path("/proc/self/mounts").read_text(errors="replace").split("\n")
    except OSError:
        return ""
    # The last line wins: a later mount hides an earlier one at the same place.
    for fields in (line.split() for line in reversed(lines)):
        if len(fields) >= 3 and fields[1] == str(mount_point).replace(" ", "\\040"):
            return f" ({fields[2]})"
    return ""
