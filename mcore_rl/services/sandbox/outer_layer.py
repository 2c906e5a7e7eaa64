"""Puts bubblewrap around a warden: namespaces and a root of its own, made by another program.

bwrap: /usr, runtimes, this package, read-only; no home, no network
  +-- warden: its own namespaces, a root without this package
        +-- boxes
"""

import os
import shutil
from collections.abc import Sequence

from mcore_rl.services.sandbox.limits import SandboxError

_NAMESPACES = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts")
_WITHOUT_FOLDER = ("/usr/bin/env", "-u", "PWD")
_USER_LIMITS = "/proc/sys/user"
"""A warden forbids further user namespaces there."""


def outer_command(paths: Sequence[str], writable: Sequence[str] = ()) -> list[str]:
    """Return the words in front of a command that runs it in bubblewrap.

    paths      folders and files that it sees, read-only
    writable   files that it may write, such as those by which a process joins a cgroup

    Raises SandboxError if this machine has no bubblewrap.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(
            "no bwrap is found, which sandbox.bubblewrap=true or --bubblewrap asks for: install the"
            " package bubblewrap on this machine, or leave the option out"
        )
    # No --die-with-parent: it would end with the thread that started it. It ends with the warden.
    words = [program, *_NAMESPACES, "--dev", "/dev", "--proc", "/proc"]
    for path in sorted(set(paths), key=len):
        words += ["--ro-bind", path, path]
    for path in writable:
        words += ["--bind", path, path]
    if os.geteuid() == 0:
        # Without rights root could not give the warden the user nobody.
        words += ["--cap-add", "ALL", "--bind", _USER_LIMITS, _USER_LIMITS]
    else:
        words.append("--unshare-user")
    # bubblewrap tells the command the folder of the host that it was started in.
    return [*words, "--chdir", "/", "--", *_WITHOUT_FOLDER]
