"""Runs a command of mcore-rl in a fork of a process that has imported torch already."""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.distributed import run_ranks


def run_forked(arguments: Sequence[str], folder: Path, timeout_s: float) -> tuple[int, str]:
    """Return the exit status of `mcore-rl <arguments>`, run in `folder`, and what it printed.

    It may start processes, but none by multiprocessing.
    """
    (answer,) = run_ranks(_run, 1, list(arguments), folder, timeout_s=timeout_s)
    return answer


def _run(
    rank: int, world_size: int, port: int, arguments: list[str], folder: Path
) -> tuple[int, str]:
    from mcore_rl.cli import main

    os.chdir(folder)
    with tempfile.TemporaryFile("w+") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
        try:
            status = main(arguments)
        except SystemExit as refusal:  # of arguments
            status = int(refusal.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
        output.seek(0)
        return status, output.read()
