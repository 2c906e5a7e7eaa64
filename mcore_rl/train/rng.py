"""Seeds, saves and restores every random generator that training on a rank may draw from."""

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

Generators = Mapping[str, torch.Generator]
"""torch's default generators by name, as device.rng.default_generators returns them."""
_log = logging.getLogger(__name__)


def seed_generators(generators: Generators, seed: int) -> None:
    """Seed Python's, numpy's and torch's generators; megatron-core seeds its tracker by itself.

    `model_parallel_cuda_manual_seed` reaches a GPU's generator only, and a rank that was forked
    draws numpy's numbers from the operating system's entropy.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    for generator in generators.values():
        generator.manual_seed(seed)


def rng_state(generators: Generators) -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators and megatron-core's tracker.

    The tracker holds a generator per kind of parallelism. Those of `generators` lie under their
    names.
    """
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
        **{name: generator.get_state() for name, generator in generators.items()},
    }


def set_rng_state(state: Mapping[str, Any], generators: Generators) -> None:
    """Restore what `rng_state` returned.

    A generator stays as run.seed seeded it, with a warning, if the state has none of its name or
    one of another device: a run on CPUs may go on on GPUs, and the reverse.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    for name, generator in generators.items():
        if name in state and _are_alike(state[name], generator.get_state()):
            generator.set_state(state[name])
        else:
            _warn_of(name)
    tracker = get_cuda_rng_tracker()
    here = tracker.get_states()
    saved = state["tracker"]
    if saved.keys() == here.keys() and all(_are_alike(saved[name], here[name]) for name in here):
        tracker.set_states(saved)
    else:
        _warn_of("megatron-core's tracker")


def _are_alike(saved: torch.Tensor, here: torch.Tensor) -> bool:
    """Return whether two states are of the same kind of generator; those of devices differ in
    length.
    """
    return saved.shape == here.shape


def _warn_of(name: str) -> None:
    _log.warning(
        "the checkpoint holds no state of the generator %s that fits this device: its numbers"
        " begin anew from run.seed",
        name,
    )
