"""Moves a warden into namespaces of its own, with a root of read-only runtimes.

System calls that Python lacks are made through ctypes: namespaces, mounts, rights, safe opens.
"""

import ctypes
import errno
import os
import signal
import struct
from collections.abc import Iterable

from mcore_rl.services.sandbox.seccomp import ALLOWED, NEEDED

NEW_MOUNTS, NEW_CGROUP, NEW_UTS, NEW_IPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEW_USER, NEW_PIDS, NEW_NET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 0x1, 0x2, 0x4, 0x20, 0x1000
MS_REC, MS_PRIVATE, MNT_DETACH = 0x4000, 0x40000, 0x2
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _AT_RECURSIVE, _AT_FDCWD = 0x1, 0x2, 0x8000, -100
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_JOIN_SESSION_KEYRING = 1
_RESOLVE_NO_XDEV, _RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 1, 2, 4, 8
SAFE = _RESOLVE_NO_XDEV | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH

_libc = ctypes.CDLL(None, use_errno=True)
_locked_libc = ctypes.PyDLL(None, use_errno=True)
"""Keeps Python's lock during a call, so that a clone holds it in both processes."""
MACHINE = os.uname().machine


def check(result: int, call: str) -> int:
    """Return `result`, or raise the OSError of a call that returned a negative number."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    encoded = [text.encode() if text else None for text in (source, target, kind)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), data.encode() or None)
    check(result, f"mount {target}")


def make_read_only(target: str) -> None:
    """Make `target` and all mounts below it read-only. Needs Linux 5.12."""
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    number = NEEDED[MACHINE]["mount_setattr"]
    arguments = (_AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, len(attributes))
    check(_libc.syscall(number, *arguments), f"mount_setattr {target}")


def pivot_root(root: str) -> None:
    """Make the mount `root` the root of all paths, and let go of the former one."""
    os.chdir(root)
    check(_libc.syscall(NEEDED[MACHINE]["pivot_root"], b".", b"."), "pivot_root")
    check(_libc.umount2(b".", MNT_DETACH), "umount of the former root")
    os.chdir("/")


def unshare(flags: int) -> None:
    check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def clone(flags: int) -> int:
    """Fork into new namespaces: return 0 in the child, and the child's pid in the parent.

    Only for a process with one thread. Python's fork hooks do not run in the child.
    """
    number = NEEDED[MACHINE]["clone"]
    arguments = (ctypes.c_ulong(flags | signal.SIGCHLD), None, None, None, None)
    return check(_locked_libc.syscall(number, *arguments), "clone")


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def drop_bounding_rights() -> None:
    """Give up the capabilities that a later exec could grant."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            if ctypes.get_errno() == errno.EINVAL:  # the kernel has no more of them
                break
            check(-1, f"prctl(PR_CAPBSET_DROP, {capability})")
    check(_libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "prctl(PR_CAP_AMBIENT)")


def drop_rights() -> None:
    """Give up all capabilities, and the ways to get new ones by exec."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    check(_libc.syscall(NEEDED[MACHINE]["capset"], header, bytes(24)), "capset")
    check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def join_new_keyring() -> None:
    """Leave the session keyring of the caller, where the machine allows keyrings at all."""
    if _libc.syscall(NEEDED[MACHINE]["keyctl"], _JOIN_SESSION_KEYRING, None) < 0:
        number = ctypes.get_errno()
        # Containers often refuse the call; the filter refuses it to programs in any case.
        if number not in (errno.EPERM, errno.ENOSYS, errno.EDQUOT):
            check(-1, "keyctl(KEYCTL_JOIN_SESSION_KEYRING)")


def open_beneath(folder_fd: int, path: str, flags: int, mode: int = 0) -> int:
    """Open a path below a folder that passes no link, no mount and no "..".

    Raises OSError if it would: ELOOP for a link, EXDEV for a mount or "..".
    """
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, SAFE)
    number = ALLOWED[MACHINE]["openat2"]
    result = _libc.syscall(number, folder_fd, os.fsencode(path), how, len(how))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return result


NOBODY, INNER_ID = 65534, 1000
"""A program is INNER_ID in its namespace. If root started the sandbox, that is nobody outside."""
BOX = "/box"
_DEVICES = ("null", "zero", "full", "urandom", "random")
_ROOT = "/proc"
"""The new root is mounted here, since every machine has the folder and no runtime is below it."""
_SPACES = NEW_USER | NEW_MOUNTS | NEW_NET | NEW_IPC | NEW_UTS | NEW_CGROUP


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
    unshare(_SPACES)
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
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    flags = MS_NOSUID | MS_NODEV
    mount("tmpfs", _ROOT, "tmpfs", flags, "size=1m,nr_inodes=1024,mode=755")
    for path in sorted(set(paths), key=len):
        target = _ROOT + path
        if not os.path.lexists(target):
            _make_mount_point(path, target)
            mount(path, target, flags=MS_BIND | MS_REC)
            make_read_only(target)
    os.mkdir(f"{_ROOT}/dev")
    for device in _DEVICES:
        _make_mount_point(f"/dev/{device}", f"{_ROOT}/dev/{device}")
        mount(f"/dev/{device}", f"{_ROOT}/dev/{device}", flags=MS_BIND)
    os.symlink(BOX, f"{_ROOT}/dev/shm")
    os.mkdir(_ROOT + BOX)
    if not os.path.exists(f"{_ROOT}/tmp"):  # it exists if a runtime is below /tmp
        os.symlink("box", f"{_ROOT}/tmp")
    pivot_root(_ROOT)
    remount = MS_REMOUNT | MS_BIND | MS_RDONLY
    mount("none", "/", flags=remount | flags)


def _make_mount_point(source: str, target: str) -> None:
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
    mount("tmpfs", BOX, "tmpfs", MS_NOSUID | MS_NODEV, data)
    os.chdir(BOX)
