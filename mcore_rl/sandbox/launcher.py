"""Reads a job of run.py as JSON from stdin and runs its command in new Linux namespaces.

Three processes take part: this one, in the new user namespace; the first process of the new
process namespace, which builds a root of read-only folders; and the command. When the caller or
one of the first two ends, the kernel kills all that is left.
"""

import ctypes
import json
import os
import resource
import select
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


def _die_with_caller(caller_pid: int) -> None:
    """Have the kernel kill this process when the caller ends; exit if the caller has ended already.

    The kernel only signals a death after the request. If the caller died before it, this process
    already has another parent.
    """
    _request_death_signal()
    if os.getppid() != caller_pid:
        os._exit(1)


def _die_with_launcher(alive_fd: int) -> None:
    """Do the same in the first process of the new namespace, to which every parent has pid 0.

    `alive_fd` is the read end of a pipe whose write end only the launcher holds.
    """
    _request_death_signal()
    if select.select([alive_fd], [], [], 0)[0]:  # end of file: the launcher is gone
        os._exit(1)
    os.close(alive_fd)


def _request_death_signal() -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl(PR_SET_PDEATHSIG)")


def _enter_namespaces() -> None:
    """Enter new namespaces as a user without rights.

    If root runs the launcher, the command becomes the user nobody. It then cannot read root's
    files, and the limit on processes applies, from which root is exempt.
    """
    uid = os.geteuid()
    gid = os.getegid()
    is_root = uid == 0
    if is_root:
        both = f"0 0 1\n{_INNER_ID} {_NOBODY} 1"
        maps = {"uid_map": both, "gid_map": both}
    else:
        uid_map = f"{_INNER_ID} {uid} 1"
        gid_map = f"{_INNER_ID} {gid} 1"
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
    """Make `root` the root: `folders` read-only, some devices, a writable /box with `files`."""
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")  # in a further namespace the command could mount unlimited memory
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
    if not os.path.exists(f"{root}/tmp"):  # it exists if Python or its packages are below /tmp
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
    """Make `target` and all mounts below it read-only. Needs Linux 5.12."""
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
    """Become the command. Its capabilities end with exec, as the inner user is not root."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_INNER_ID, _INNER_ID, _INNER_ID)
        os.setresuid(_INNER_ID, _INNER_ID, _INNER_ID)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    for name, value in job["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    os.execve(job["command"][0], job["command"], job["environment"])


def _status(waited: int) -> int:
    """Return an exit status as a shell does: 128 + signal for a process that was killed."""
    code = os.waitstatus_to_exitcode(waited)
    return code if code >= 0 else 128 - code


def _run_first(job: dict[str, Any], report_fd: int) -> NoReturn:
    """Build the root, start the command, and end with its status.

    The kernel gives the orphans of a namespace to its first process, which must wait for them.
    """
    _build_root(job["root"], job["folders"], job["files"], job["tmp_bytes"])
    command = os.fork()
    if command == 0:
        _run_command(job)
    os.close(report_fd)
    while True:
        pid, waited = os.wait()
        if pid == command:
            os._exit(_status(waited))


def main() -> None:
    job = json.loads(sys.stdin.buffer.readline())
    report_fd = job["report_fd"]
    os.set_inheritable(report_fd, False)
    stdin = os.open(job["stdin"], os.O_RDONLY)
    os.dup2(stdin, 0)
    os.close(stdin)
    try:
        _die_with_caller(job["caller_pid"])
        _enter_namespaces()
        alive_fd, held_fd = os.pipe()
        first = os.fork()
        if first == 0:
            os.close(held_fd)
            _die_with_launcher(alive_fd)
            _run_first(job, report_fd)
        os.close(alive_fd)
    except OSError as error:
        os.write(report_fd, str(error).encode())
        os._exit(1)
    os.close(report_fd)
    os._exit(_status(os.waitpid(first, 0)[1]))


if __name__ == "__main__":
    main()
