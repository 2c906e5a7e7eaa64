"""A run that fills its disk ends with one line, and goes on once there is space."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs import Run
from tests.support.small_disks import mounted
from tests.support.victims import assert_complete

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
SETTINGS = ("run.steps=4", "checkpoint.every_steps=1", "rollout.restarts=0")


def test_a_full_disk_costs_nothing_but_a_restart(start: Callable[..., Run], tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=300m") as disk:
        run = start("train", *SETTINGS, run_dir=disk / "run")
        run.wait_for("step 2: train", poll_s=0.002)
        filler = disk / "filler"
        fill(filler)
        assert run.finish() == 1, run.tail()
        run.assert_nothing_left()
        told = [line for line in run.tail().splitlines() if "mcore-rl: " in line]
        assert len(told) == 1 and f"cannot write {disk}/run/" in told[0], run.tail()
        assert f"its filesystem {disk} (tmpfs) has 0 bytes of 300 MiB free" in told[0]
        assert "run the same command again" in told[0] and "Traceback" not in run.tail()

        filler.unlink()
        again = start("train", *SETTINGS, run_dir=disk / "run")
        assert again.finish() == 0, again.tail()
        assert_complete(again, 4)
        again.assert_nothing_left()


def fill(path: Path) -> None:
    """Write a file until no byte is left."""
    with path.open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    assert os.statvfs(path).f_bavail == 0
