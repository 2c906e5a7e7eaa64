"""A killed process is waited for, but not for ever."""

import multiprocessing
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mcore_rl.process.process_state import wait_killed


def start_popen() -> Any:
    return subprocess.Popen(["sleep", "60"])


def start_process() -> Any:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    return process


@pytest.fixture(params=[start_popen, start_process])
def process(request: pytest.FixtureRequest) -> Iterator[Any]:
    started: Callable[[], Any] = request.param
    running = started()
    yield running
    running.kill()
    assert wait_killed(running, "the test's")


def test_a_killed_process_is_waited_for(process: Any) -> None:
    process.kill()
    assert wait_killed(process, "sleep")


def test_one_that_does_not_end_is_left_behind_and_named(
    process: Any, caplog: pytest.LogCaptureFixture
) -> None:
    began_s = time.monotonic()
    assert not wait_killed(process, "sleep", timeout_s=0.2)
    assert time.monotonic() - began_s < 5
    assert f"sleep (process {process.pid}) did not end within 0.2 s after it" in caplog.text
