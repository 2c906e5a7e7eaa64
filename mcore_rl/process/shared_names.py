"""Has the names of shared memory and semaphores removed also if SIGKILL ends their processes.

    this process --+-- pipe --> resource tracker, in a session of its own
    its children --+              unlinks what they have named, once all of them have ended

Python starts the resource tracker where it is first needed, in the process group of that process. A
SIGKILL to the group then ends it before it has removed anything, and /dev/shm fills up.
"""

import os
import subprocess
import sys
from multiprocessing import resource_tracker
from typing import Any

_MAIN = "from multiprocessing.resource_tracker import main; main({})"


def start_resource_tracker() -> None:
    """Start it for this process and those that it will start; call this before there are any.

    The tracker has no environment, so that whoever kills all processes of a run by a variable
    leaves it, too.
    """
    reading, writing = os.pipe()
    command = [sys.executable, "-I", "-S", "-c", _MAIN.format(reading)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[reading],
        start_new_session=True,
        env={},
    )
    os.close(reading)
    tracker: Any = vars(resource_tracker)["_resource_tracker"]
    tracker._fd, tracker._pid = writing, process.pid
