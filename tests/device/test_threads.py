"""Threads work on the device of their rank, which CUDA keeps for each thread."""

import re
import threading
from pathlib import Path

import pytest
import torch

import mcore_rl
from mcore_rl.device.threads import open_pool, start_thread

ON_THE_HOST = {"transports/gloo.py", "store/server.py", "staging.py"}
"""Files of weight_sync that start threads which touch host memory alone."""


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.device]:
    """By thread, the device that it made current; there is no CUDA here to ask."""
    entered: dict[str, torch.device] = {}

    def set_device(device: torch.device) -> None:
        entered[threading.current_thread().name] = device

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    return entered


def test_a_thread_and_those_of_a_pool_enter_the_device_before_they_work(
    entered: dict[str, torch.device],
) -> None:
    gpu = torch.device("cuda", 3)
    seen: list[torch.device] = []

    def work(number: int) -> int:
        seen.append(entered[threading.current_thread().name])
        return number

    start_thread(gpu, work, (0,), name="connect").join(5)
    with open_pool(gpu, 2, "links") as pool:
        assert list(pool.map(work, range(4))) == [0, 1, 2, 3]
    assert seen == [gpu] * 5


def test_a_thread_of_the_host_enters_no_device(entered: dict[str, torch.device]) -> None:
    start_thread(torch.device("cpu"), lambda: None).join(5)
    assert not entered


def test_syncs_start_threads_that_touch_a_device_in_no_other_way() -> None:
    room = Path(mcore_rl.__file__).parent / "weight_sync"
    starting = {
        path.relative_to(room).as_posix()
        for path in room.rglob("*.py")
        if re.search(r"\bThread\(|\bThreadPoolExecutor\(", path.read_text())
    }
    assert starting == ON_THE_HOST
