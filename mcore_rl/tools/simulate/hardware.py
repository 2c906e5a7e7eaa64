"""Peak rates of accelerators, and the shares of them that kernels reach.

Peaks are of the vendors' data sheets, for dense bfloat16. The shares are assumptions; a run on GPUs
would measure them (docs/simulate.md). Those of a CPU are of one core, measured on a laptop.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuRates:
    """Rates of one accelerator.

    flops      bfloat16 operations per second
    memory     bytes per second of its memory
    link       bytes per second to accelerators of the same host, in each direction
    host_link  bytes per second to host memory
    row_s      seconds of a request in a layer, apart from its operations, where an engine computes
               the attention of one request after the other
    """

    flops: float
    memory: float
    link: float
    host_link: float
    row_s: float = 0.0


GPUS = {
    "a100": GpuRates(312e12, 2.04e12, 300e9, 25e9),
    "h100": GpuRates(989e12, 3.35e12, 450e9, 50e9),
    "h20": GpuRates(148e12, 4.0e12, 450e9, 50e9),
    "h200": GpuRates(989e12, 4.8e12, 450e9, 50e9),
    "b200": GpuRates(2250e12, 8.0e12, 900e9, 50e9),
    "mi300x": GpuRates(1307e12, 5.3e12, 448e9, 50e9),
    "cpu": GpuRates(2e11, 5e9, 2e9, 5e9, row_s=35e-6),
}


@dataclass(frozen=True)
class ReachedShares:
    """ReachedShares of the peaks that are reached, and fixed times in seconds.

    train, prefill, decode_flops   of the operations per second, in forward and backward passes, in
                                   prefill, and in decode steps
    memory, link, network          of the bytes per second
    layer_s                        of a layer's kernels and collective calls in a decode step, apart
                                   from what they move
    remote_layer_s                 the same where an engine spans hosts: two all-reduces over the
                                   network
    step_s                         of a decode step in the scheduler
    microbatch_s                   of a micro-batch, apart from its operations
    call_s                         of a call to all ranks
    pause_s                        for an engine to pause, to swap its weights and to go on
    """

    train: float = 0.3
    prefill: float = 0.5
    decode_flops: float = 0.4
    memory: float = 0.7
    link: float = 0.6
    network: float = 0.7
    layer_s: float = 12e-6
    remote_layer_s: float = 100e-6
    step_s: float = 1e-3
    microbatch_s: float = 0.01
    call_s: float = 0.02
    pause_s: float = 0.3
