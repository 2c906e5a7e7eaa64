"""Runs one command in namespaces of its own; a script for run.py, which passes all of it as JSON.

Three processes: this one, in the new user namespace; the first of the new process namespace, which builds a
root of read-only folders; and the command. When one of the first two ends, the kernel ends all that is left.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND = 0x1, 0x2, 0x4, 0x20, 0x1000
_MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x4000, 0x40000, 0x2
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _AT_RECURSIVE, _AT_FDCWD = 0x1, 0x2, 0x8000, -100
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_NOBODY, _INNER_ID = 65534, 1000
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    encoded = [text.encode() if text else None for text in (source, target, kind)]
    _check(_libc.mount(*encoded, ctypes.c_ulong(flags), data.encode() or None), f"mount {target}")


def _die_with_parent() -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl(PR_SET_PDEATHSIG)")


def _enter_namespaces() -> None:
    """If this is root, the command becomes nobody: root's files stay unread, and limits on processes bind."""
    uid, gid, is_root = os.geteuid(), os.getegid(), os.geteuid() == 0
    maps = {"uid_map": f"{_INNER_ID} {uid} 1", "gid_map": f"{_INNER_ID} {gid} 1"}
    if is_root:
        maps = dict.fromkeys(maps, f"0 0 1\n{_INNER_ID} {_NOBODY} 1")
    else:
        maps = {"setgroups": "deny", **maps}
    unshared, writer = os.pipe()
    this, helper = os.getpid(), os.fork()
    if helper == 0:  # two ranges may be written from outside alone
        os.close(writer)
        if os.read(unshared, 1):
            _write_maps(this, maps)
        os._exit(0)
    os.close(unshared)
    spaces = (
        _CLONE_NEWUSER
        | _CLONE_NEWNS
        | _CLONE_NEWPID
        | _CLONE_NEWNET
        | _CLONE_NEWIPC
        | _CLONE_NEWUTS
    )
    _check(_libc.unshare(spaces), "unshare")
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


def _build_root(root: str, folders: list[str], files: dict[str, str], tmp_bytes: int) -> None:
    """A root at `root`: `folders` read-only, a few devices, and /box, with `files`, which can be written."""
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")  # in a namespace of its own the command could mount memory without limit
    _mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for folder in folders:
        target = root + folder
        if not os.path.exists(target):
            os.makedirs(target)
            _mount(folder, target, flags=_MS_BIND | _MS_REC)
            _make_read_only(target)
    os.mkdir(f"{root}/dev")
    for device in ("null", "zero", "urandom", "random"):
        with open(f"{root}/dev/{device}", "w"):
            pass
        _mount(f"/dev/{device}", f"{root}/dev/{device}", flags=_MS_BIND)
    os.mkdir(f"{root}/box")
    if not os.path.exists(f"{root}/tmp"):  # else packages lie below it
        os.symlink("box", f"{root}/tmp")
    _mount("tmpfs", f"{root}/box", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={tmp_bytes},mode=777")
    for name, text in files.items():
        with open(f"{root}/box/{name}", "w") as file:
            file.write(text)
    os.chdir(root)
    _check(_libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/box")
    _mount("none", "/", flags=_MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _make_read_only(target: str) -> None:
    """With all that is mounted below. Linux 5.12."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR,
        _AT_FDCWD,
        target.encode(),
        _AT_RECURSIVE,
        attributes,
        ctypes.sizeof(attributes),
    )
    _check(result, f"mount_setattr {target}")


def _run_command(job: dict[str, Any]) -> NoReturn:
    """Capabilities end at the latest with exec, as the inner user is not root."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_INNER_ID, _INNER_ID, _INNER_ID)
        os.setresuid(_INNER_ID, _INNER_ID, _INNER_ID)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    for name, value in job["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    os.execve(job["command"][0], job["command"], job["environment"])


def _status(waited: int) -> int:
    code = os.waitstatus_to_exitcode(waited)
    return code if code >= 0 else 128 - code


def main() -> None:
    job = json.loads(sys.stdin.buffer.readline())
    report = job["report_fd"]
    os.set_inheritable(report, False)
    stdin = os.open(job["stdin"], os.O_RDONLY)
    os.dup2(stdin, 0)
    os.close(stdin)
    try:
        _die_with_parent()
        _enter_namespaces()
        first = os.fork()
        if first == 0:
            _die_with_parent()
            _build_root(job["root"], job["folders"], job["files"], job["tmp_bytes"])
            command = os.fork()
            if command == 0:
                _run_command(job)
            os.close(report)
            while True:  # the first process of a namespace is given the orphans to wait for
                pid, waited = os.wait()
                if pid == command:
                    os._exit(_status(waited))
    except OSError as error:
        os.write(report, str(error).encode())
        os._exit(1)
    os.close(report)
    os._exit(_status(os.waitpid(first, 0)[1]))


if __name__ == "__main__":
    main()
