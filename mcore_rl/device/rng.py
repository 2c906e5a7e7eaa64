"""The default random generators of this process: the host's and, with CUDA, its GPU's.

Without CUDA there is one: `alias_rng` in cpu/megatron_patches.py hands megatron-core the
host's for both.
"""

import torch

from mcore_rl.device import has_cuda

HOST = "torch"
GPU = "cuda"


def default_generators() -> dict[str, torch.Generator]:
    """Return the generators that torch's random functions draw from without one of their own.

    By name: HOST, and with CUDA also GPU, which is the current device's.
    """
    generators = {HOST: torch.default_generator}
    if has_cuda():
        torch.cuda.init()  # the generators of GPUs exist from here on
        generators[GPU] = torch.cuda.default_generators[torch.cuda.current_device()]
    return generators
