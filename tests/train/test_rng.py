"""Seeded and restored generators draw again what they drew before."""

import logging
import random
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mcore_rl.device import GPU_RNG, HOST_RNG, default_generators, device, has_cuda
from mcore_rl.train.runtime import rng_state, seed_generators, set_rng_state
from tests.support.distributed import run_alone


def two_generators() -> dict[str, torch.Generator]:
    """Return the host's generator, and one apart from it where a GPU_RNG has its own."""
    return {HOST_RNG: torch.default_generator, GPU_RNG: torch.Generator().manual_seed(5)}


def draw(generators: Mapping[str, torch.Generator]) -> list[float]:
    """Return a number of each generator of a rank, those of `generators` last."""
    with get_cuda_rng_tracker().fork():
        tracked = torch.rand((), device=device()).item()
    of_torch = [torch.rand((), generator=g, device=g.device).item() for g in generators.values()]
    return [random.random(), float(np.random.rand()), tracked, *of_torch]


def draw_three_times(generators: Mapping[str, torch.Generator]) -> list[list[float]]:
    state = rng_state(generators)
    first, second = draw(generators), draw(generators)
    set_rng_state(state, generators)
    return [first, second, draw(generators)]


def draw_with_a_generator_of_its_own_for_the_gpu() -> list[list[float]]:
    return draw_three_times(two_generators())


def test_a_restored_state_draws_the_same_from_every_generator() -> None:
    """The GPU's generator is the host's without CUDA, which would hide that its state is lost."""
    first, second, again = run_alone(draw_with_a_generator_of_its_own_for_the_gpu)
    assert len(first) == 5 and again == first
    assert all(a != b for a, b in zip(first, second, strict=True))


def draw_from_default_generators() -> list[list[float]]:
    return draw_three_times(default_generators())


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU_RNG")
def test_a_restored_state_draws_the_same_from_the_generator_of_a_gpu() -> None:
    first, second, again = run_alone(draw_from_default_generators)
    assert len(first) == 5, "the GPU_RNG has no generator of its own"
    assert again == first
    assert all(a != b for a, b in zip(first, second, strict=True))


def draw_after_the_start() -> list[float]:
    """Draw what the process groups of `run_alone` were started with."""
    return draw(default_generators())


def draw_twice_from_one_seed() -> list[list[float]]:
    generators = two_generators()
    drawn = []
    for _ in range(2):
        seed_generators(generators, 3)
        drawn.append(draw(generators))
    return drawn


def test_equal_seeds_draw_the_same_from_every_generator() -> None:
    first, again = run_alone(draw_twice_from_one_seed)
    # The third is megatron-core's tracker, which has its own seed.
    assert first[:2] + first[3:] == again[:2] + again[3:]
    assert first[3] == first[4], "a generator was not seeded"


def test_ranks_of_two_runs_with_the_same_seed_draw_the_same() -> None:
    assert run_alone(draw_after_the_start) == run_alone(draw_after_the_start)


def restore_on_another_device() -> tuple[list[float], list[float], list[str]]:
    """Restore a state of this device's generators whose states on a GPU_RNG have another length."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("mcore_rl.train.runtime").addHandler(handler)
    generators = two_generators()
    state = rng_state(generators)
    of_gpu = torch.zeros(16, dtype=torch.uint8)
    foreign = {**state, "tracker": dict.fromkeys(state["tracker"], of_gpu), GPU_RNG: of_gpu}
    before = draw(generators)
    set_rng_state(state, generators)
    set_rng_state(foreign, generators)
    return before, draw(generators), messages


def test_the_state_of_another_device_is_left_out_with_a_warning() -> None:
    before, after, messages = run_alone(restore_on_another_device)
    assert after == before
    assert [message.split("generator ")[1].split(" that")[0] for message in messages] == [
        "cuda",
        "megatron-core's tracker",
    ]
