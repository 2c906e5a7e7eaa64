"""Restored generators draw again what they drew before."""

import random

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mcore_rl.train.rng import rng_state, set_rng_state
from tests.support.distributed import run_alone


def draw() -> list[float]:
    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(()).item()
    return [random.random(), float(np.random.rand()), torch.rand(()).item(), tracked]


def draw_three_times() -> list[list[float]]:
    state = rng_state()
    first, second = draw(), draw()
    set_rng_state(state)
    return [first, second, draw()]


def test_a_restored_state_draws_the_same_from_every_generator() -> None:
    first, second, again = run_alone(draw_three_times)
    assert again == first
    assert all(a != b for a, b in zip(first, second, strict=True))
