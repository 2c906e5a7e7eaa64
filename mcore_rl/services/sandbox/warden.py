"""A process that keeps prepared namespaces and starts one box after another in them.

It is started with descriptors of a socket and of its caller's process, and ends when the socket
closes or the caller ends, whichever comes first. A box is a process that it clones into new
namespaces of processes and mounts. Namespaces of user, network, IPC and names serve all its boxes:
programs have no right to leave anything in them.
"""

import gc
import os
import signal
import socket
from collections.abc import Callable

from mcore_rl.services.sandbox import isolation
from mcore_rl.services.sandbox.first_process import FirstProcess
from mcore_rl.services.sandbox.isolation import build_root, enter_namespaces
from mcore_rl.services.sandbox.messages import Message, receive, send, wait_readable
from mcore_rl.services.sandbox.seccomp import make_filter


class Warden:
    """Opens boxes until its caller hangs up or ends."""

    def __init__(self, control: socket.socket, caller: int, kept: frozenset[str]) -> None:
        self._control = control
        self._kept = kept
        self._caller = caller
        self._joins: list[int] = []
        self._filter = b""
        self._alive, self._held = os.pipe()

    def prepare(self, options: Message) -> None:
        """Enter the namespaces; OSError says which step this machine refuses."""
        self._filter = make_filter(isolation.MACHINE)
        self._joins = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in options["joins"]]
        isolation.join_new_keyring()
        enter_namespaces()
        build_root(options["paths"])
        gc.collect()
        gc.freeze()  # so that collections in a fork leave the pages of this process shared

    def serve(self) -> Callable[[], None] | None:
        """Open boxes one at a time; return the program to run in a process forked below."""
        ends = [self._control.fileno(), self._caller]
        while True:
            ready = wait_readable(ends, None)
            received = None if self._caller in ready else receive(self._control)
            if received is None:
                return None
            options, fds = received
            pid = isolation.clone(isolation.NEW_PIDS | isolation.NEW_MOUNTS)
            if pid == 0:
                os.close(self._held)
                self._control.close()
                call = socket.socket(fileno=fds[0])
                first = FirstProcess(call, self._alive, self._joins, self._filter, self._kept)
                return first.serve(options)
            os.close(fds[0])
            if not self._outlive(pid):
                return None
            send(self._control, {"closed": True})

    def _outlive(self, pid: int) -> bool:
        """Wait until a box has ended; end it and return False if the caller ends before."""
        ended = os.pidfd_open(pid)
        ready = wait_readable([ended, self._caller, self._control.fileno()], None)
        if ended not in ready:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ended)
        return ended in ready


def main(control_fd: int, caller_fd: int, kept: frozenset[str]) -> Callable[[], None] | None:
    """Serve a caller.

    caller_fd   a pidfd: the caller's number means nothing in a process namespace of an outer layer
    kept        names of the modules that programs find loaded
    Returns only in a process forked for a program, with that program.
    """
    control = socket.socket(fileno=control_fd)
    warden = Warden(control, caller_fd, kept)
    received = receive(control)
    if received is None:
        os._exit(1)
    try:
        warden.prepare(received[0])
    except (OSError, ValueError) as error:
        send(control, {"error": str(error)})
        os._exit(1)
    send(control, {"ready": True})
    program = warden.serve()
    if program is None:
        os._exit(0)
    return program
