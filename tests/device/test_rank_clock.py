"""Seconds of a rank's own work: waits are none of them."""

import time

import pytest
import torch

from mcore_rl.device.rank_clock import RankClock, read_thread_s


def burn(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def test_sleep_is_no_work() -> None:
    began_s = read_thread_s()
    time.sleep(0.3)
    assert read_thread_s() - began_s < 0.1
    burn(0.1)
    assert read_thread_s() - began_s >= 0.1


def test_phases_are_summed_until_they_are_taken() -> None:
    clock = RankClock()
    for _ in range(2):
        clock.begin("train")
        burn(0.05)
        clock.end()
    clock.begin("forward")
    burn(0.02)
    clock.begin("train")
    taken = clock.take()
    assert taken["train"] >= 0.1 and taken["forward"] >= 0.02
    assert clock.take() == {}


def test_a_phase_ends_before_the_work_that_ends_it() -> None:
    clock = RankClock()

    def reduce(seconds: float, *, times: int) -> None:
        burn(seconds * times)

    clock.begin("train")
    burn(0.02)
    clock.end_before(reduce)(0.1, times=5)
    clock.end()
    assert 0.02 <= clock.take()["train"] < 0.5


@pytest.mark.gpu
def test_kernels_of_a_gpu_are_timed_by_its_events() -> None:
    clock = RankClock()
    a = torch.rand(8192, 8192, device="cuda")
    clock.begin("train")
    for _ in range(20):
        a = a @ a
        a /= a.norm()
    clock.end()
    time.sleep(0.5)
    assert 1e-3 < clock.take()["train"] < 0.4
