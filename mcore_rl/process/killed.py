"""Waits for processes that were killed; one that the kernel keeps is given up and named."""

import logging
import subprocess
from multiprocessing.process import BaseProcess

KILLED_S = 20.0
"""A killed process ends at once, unless it is in a driver or waits for a disk that is gone."""
_log = logging.getLogger(__name__)


def wait_killed(
    process: "subprocess.Popen[bytes] | subprocess.Popen[str] | BaseProcess",
    name: str,
    timeout_s: float = KILLED_S,
) -> bool:
    """Return whether a process that was sent SIGKILL ended in time; a warning tells if not."""
    if isinstance(process, BaseProcess):
        process.join(timeout_s)
        has_ended = process.exitcode is not None
    else:
        try:
            process.wait(timeout_s)
            has_ended = True
        except subprocess.TimeoutExpired:
            has_ended = False
    if not has_ended:
        _log.warning(
            "%s (process %s) did not end within %g s after it was killed: it hangs in the kernel,"
            " in a driver or at a disk, and is left behind",
            *(name, process.pid, timeout_s),
        )
    return has_ended
