"""Processes are found by a tag in their environment, whoever their parents are, and killed."""

import os
import subprocess
import sys

from mcore_rl.agents.environments.worker_process import TAG, kill_tagged

DETACHED = """
import os, time
if os.fork() == 0:
    os.setsid()
    print("up", flush=True)
time.sleep(300)
"""
"""Two processes; the second has a session of its own."""


def start(tag: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", DETACHED], env={**os.environ, TAG: tag}, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    return process


def test_all_that_have_the_tag_are_killed_and_no_others() -> None:
    tagged, other = start("one"), start("one more")
    try:
        assert kill_tagged("one") == 2
        assert tagged.wait(timeout=60) == -9 and other.poll() is None
        assert kill_tagged("one") == 0
    finally:
        assert kill_tagged("one more") == 2
        assert other.wait(timeout=60) == -9
