"""Moves a warden into namespaces of its own, with a root of read-only runtimes."""

import os
from collections.abc import Iterable

from mcore_rl.services.sandbox import linux

NOBODY, INNER_ID = 65534, 1000
"""A program is INNER_ID in its namespace. If root started the sandbox, that is nobody outside."""
BOX = "/box"
_DEVICES = ("null", "zero", "full", "urandom", "random")
_ROOT = "/proc"
"""The new root is mounted here, since every machine has the folder and no runtime is below it."""
_SPACES = (
    linux.NEW_USER
    | linux.NEW_MOUNTS
    | linux.NEW_NET
    | linux.NEW_IPC
    | linux.NEW_UTS
    | linux.NEW_CGROUP
)


def enter_namespaces() -> None:
    """Enter new namespaces as a user without rights outside.

    If root runs the sandbox, programs become the user nobody. They then cannot read root's files,
    and the limit on processes applies, from which root is exempt.
    """
    uid = os.geteuid()
    gid = os.getegid()
    is_root = uid == 0
    if is_root:
        both = f"0 0 1\n{INNER_ID} {NOBODY} 1"
        maps = {"uid_map": both, "gid_map": both}
    else:
        uid_map = f"{INNER_ID} {uid} 1"
        gid_map = f"{INNER_ID} {gid} 1"
        maps = {"setgroups": "deny", "uid_map": uid_map, "gid_map": gid_map}
    unshared, writer = os.pipe()
    this = os.getpid()
    helper = os.fork()
    if helper == 0:  # a map of two ranges can only be written from outside the namespace
        os.close(writer)
        if os.read(unshared, 1):
            _write_maps(this, maps)
        os._exit(0)
    os.close(unshared)
    linux.unshare(_SPACES)
    if not is_root:
        _write_maps(this, maps)
    os.write(writer, b"x" if is_root else b"")
    os.close(writer)
    if os.waitpid(helper, 0)[1]:
        raise OSError("the user namespace could not be given its users")


def _write_maps(pid: int, maps: dict[str, str]) -> None:
    for name, text in maps.items():
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(text)


def build_root(paths: Iterable[str]) -> None:
    """Replace the root by one that has only `paths` (folders and files), read-only, and devices.

    Every path must exist. The box is an empty folder until `mount_box`.
    """
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")  # in a further namespace a program would have the rights to mount
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    flags = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("tmpfs", _ROOT, "tmpfs", flags, "size=1m,nr_inodes=1024,mode=755")
    for path in sorted(set(paths), key=len):
        target = _ROOT + path
        if not os.path.lexists(target):
            _make_place(path, target)
            linux.mount(path, target, flags=linux.MS_BIND | linux.MS_REC)
            linux.make_read_only(target)
    os.mkdir(f"{_ROOT}/dev")
    for device in _DEVICES:
        _make_place(f"/dev/{device}", f"{_ROOT}/dev/{device}")
        linux.mount(f"/dev/{device}", f"{_ROOT}/dev/{device}", flags=linux.MS_BIND)
    os.symlink(BOX, f"{_ROOT}/dev/shm")
    os.mkdir(_ROOT + BOX)
    if not os.path.exists(f"{_ROOT}/tmp"):  # it exists if a runtime is below /tmp
        os.symlink("box", f"{_ROOT}/tmp")
    linux.pivot_root(_ROOT)
    remount = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY
    linux.mount("none", "/", flags=remount | flags)


def _make_place(source: str, target: str) -> None:
    """Make an empty folder or file for `source` to be mounted on."""
    if os.path.isdir(source):
        os.makedirs(target)
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "w"):
        pass


def mount_box(num_bytes: int, num_files: int) -> None:
    """Mount an empty file system in memory, of this size and so many inodes, and enter it."""
    data = f"size={num_bytes},nr_inodes={num_files},mode=777"
    linux.mount("tmpfs", BOX, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, data)
    os.chdir(BOX)
