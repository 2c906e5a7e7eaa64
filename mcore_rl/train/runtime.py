"""Makes the process groups of a parallel layout, says where this rank stands in it, and seeds it.

Every random generator that training on a rank may draw from is seeded, saved and restored here.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from mcore_rl.config import ParallelConfig
from mcore_rl.device import default_generators, dist_backend, set_local_device
from mcore_rl.device.communicators import CONNECTIONS
from mcore_rl.device.setup import keep_torch_pickles, setup_device
from mcore_rl.process.network import is_loopback, make_meeting_store, stay_on_loopback
from mcore_rl.types import RankCoordinate

Generators = Mapping[str, torch.Generator]
"""torch's default generators by name, as device.default_generators returns them."""
_log = logging.getLogger(__name__)
keep_torch_pickles()


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


def init_distributed(
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    parallel: ParallelConfig,
    seed: int,
    timeout_s: float,
    gpu_ids: Sequence[str] = (),
) -> RankCoordinate:
    """Join the other ranks and make the process groups of the layout `parallel`.

    The rank uses the GPU in `gpu_ids`; without, ranks take those of their node in turn. A process
    that has joined before only gets new groups. All generators are seeded from `seed`. Every
    collective raises after `timeout_s` on the ranks that wait. Raises ValueError if the layout
    needs another number of ranks.
    """
    if world_size != parallel.world_size:
        sizes = f"{parallel.tp} * {parallel.pp} * {parallel.cp} * {parallel.dp_size}"
        raise ValueError(
            f"{world_size} training ranks, but tp * pp * cp * dp = {sizes} = {parallel.world_size}:"
            " start that many, or change parallel.dp"
        )
    setup_device(parallel.tp)
    set_local_device(rank, gpu_ids)
    with CONNECTIONS.note():
        if not dist.is_initialized():
            if is_loopback(master_addr):
                stay_on_loopback()
            timeout = timedelta(seconds=timeout_s)
            store = make_meeting_store(master_addr, master_port, rank, world_size, timeout)
            dist.init_process_group(
                dist_backend(), store=store, rank=rank, world_size=world_size, timeout=timeout
            )
        assert dist.get_world_size() == world_size, (dist.get_world_size(), world_size)
        _make_groups(parallel, timeout_s)
    seed_generators(default_generators(), seed + 100 * ps.get_pipeline_model_parallel_rank())
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)  # a GPU's generator and the tracker
    return rank_coordinate()


def _make_groups(parallel: ParallelConfig, timeout_s: float) -> None:
    _drop_groups()
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        distributed_timeout_minutes=timeout_s / 60,  # type: ignore[arg-type]
    )


def leave_groups() -> None:
    """Have megatron-core forget its groups; torch's are left to device.communicators."""
    ps.destroy_model_parallel()


def is_true_anywhere(flag: bool) -> bool:
    """Return whether `flag` is true on any rank; all ranks must call it."""
    flags = torch.tensor([int(flag)])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def rank_coordinate() -> RankCoordinate:
    """Return this rank's place in the current layout."""
    tp = ps.get_tensor_model_parallel_rank()
    cp = ps.get_context_parallel_rank()
    return RankCoordinate(
        dp=ps.get_data_parallel_rank(),
        tp=tp,
        pp=ps.get_pipeline_model_parallel_rank(),
        cp=cp,
        ep=ps.get_expert_model_parallel_rank(),
        owns_output=is_on_last_stage() and tp == 0 and cp == 0,
    )


def is_on_last_stage() -> bool:
    """Return whether one of this rank's model chunks holds the output layer."""
    return ps.is_pipeline_last_stage(ignore_virtual=True)


def _drop_groups() -> None:
    """Destroy an earlier layout's groups; megatron-core drops them, but their threads live on."""
    world: Any = dist.distributed_c10d._world
    for group in tuple(world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
