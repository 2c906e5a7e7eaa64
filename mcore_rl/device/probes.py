"""Measured answers to questions about this machine's GPU, NCCL and torch's allocators.

Everything here needs CUDA. The answers decide how memory and communicators are set up.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from mcore_rl.device.attention import AttentionSpec, TorchFlash, attend_packed, flash_attention
from mcore_rl.device.gpu_groups import make_group

MAX_CTAS = 4


def make_lone_group(max_ctas: int | None = None) -> Any:
    """Return an NCCL group of this process alone."""
    store: Any = distributed.HashStore()  # type: ignore[attr-defined]
    return make_group(store, 0, 1, max_ctas)


def reduce_alone(group: Any, num_elements: int = 1 << 20) -> bool:
    """Return whether an all-reduce in a group of one leaves its values as they were."""
    values = torch.arange(num_elements, dtype=torch.float32, device="cuda")
    group.allreduce([values]).wait()
    torch.cuda.synchronize()
    return bool((values == torch.arange(num_elements, device="cuda")).all())


def error_of_sinks(window: int | None) -> float:
    """Return the largest relative error of attention with sinks and of its gradients, in bfloat16.

    They are compared with whole float32 matrices, on sequences of unequal length.
    """
    lens_N, scale = (700, 33, 1, 290), 0.1
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lens_N), 8, 64), (sum(lens_N), 2, 64), (sum(lens_N), 2, 64), (8,)]
    made = [torch.randn(shape, generator=generator).bfloat16().cuda() for shape in shapes]
    q, k, v, sinks_h = (tensor.requires_grad_() for tensor in made)
    cu_seqlens_N1 = torch.tensor((0, *lens_N), device="cuda").cumsum(0).int()
    kernel = TorchFlash(cu_seqlens_N1, cu_seqlens_N1, max(lens_N), max(lens_N), scale, window)
    out = flash_attention(q, k, v, sinks_h, kernel).flatten(1)
    q32, k32, v32, sinks32_h = (tensor.detach().float().requires_grad_() for tensor in made)
    exact = attend_packed(q32, k32, v32, lens_N, AttentionSpec(scale, window, sinks32_h))
    weights = torch.randn(exact.shape, generator=generator).cuda()
    got = [out, *torch.autograd.grad((out * weights).sum(), (q, k, v, sinks_h))]
    wanted = [exact, *torch.autograd.grad((exact * weights).sum(), (q32, k32, v32, sinks32_h))]
    pairs = zip(got, wanted, strict=True)
    return max(float((one.float() - other).norm() / other.norm()) for one, other in pairs)


def abort_seconds(group: Any) -> float:
    """Return the seconds in which a group is torn down without waiting for its work."""
    began_s = time.monotonic()
    group.abort()
    return time.monotonic() - began_s


def measure_pinned_bytes(num_bytes: int) -> int:
    """Return the bytes of host memory that pinning a tensor of `num_bytes` takes."""
    torch.cuda.init()  # before that there are no statistics
    pinned_u8 = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    taken = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    del pinned_u8
    return int(taken)


@dataclass(frozen=True)
class SavedMemory:
    """A tensor whose memory torch_memory_saver released and took back.

    kept        its values are as before
    released    bytes of the GPU that were free meanwhile
    same_place  it lies at the address at which it lay
    """

    kept: bool
    released: int
    same_place: bool


def release_and_resume(num_bytes: int, *, with_backup: bool) -> SavedMemory:
    """Fill a tensor, release its memory as SGLang does, take it back, and look."""
    from importlib import import_module

    saver: Any = import_module("torch_memory_saver").torch_memory_saver  # only on GPU machines
    if saver._impl is None:
        saver.hook_mode = "torch"  # the other mode needs LD_PRELOAD
    tag = f"probe_{with_backup}"
    with saver.region(tag=tag, enable_cpu_backup=with_backup):
        filled_u8 = torch.full((num_bytes,), 7, dtype=torch.uint8, device="cuda")
    address = filled_u8.data_ptr()
    before = _free_bytes()
    saver.pause(tag)
    released = _free_bytes() - before
    saver.resume(tag)
    return SavedMemory(_is_seven(filled_u8), released, filled_u8.data_ptr() == address)


class GraphedReductions:
    """All-reduces between GPUs in a CUDA graph, as the steps of a decoding engine have them."""

    def __init__(self, store: Any, rank: int, size: int, num_elements: int = 1 << 20) -> None:
        """Meet the other ranks at `store`, reduce once, and capture a graph that reduces again."""
        group = make_group(store, rank, size)
        values = torch.ones(num_elements, device="cuda")
        group.allreduce([values]).wait()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            group.allreduce([values]).wait()
        self._kept = group, values

    def replay(self, times: int) -> None:
        """Replay the graph, which all ranks do equally often, and wait for each time."""
        for _ in range(times):
            self._graph.replay()
            torch.cuda.synchronize()


def _is_seven(tensor_u8: Tensor) -> bool:
    return bool((tensor_u8 == 7).all())


def _free_bytes() -> int:
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    return free
