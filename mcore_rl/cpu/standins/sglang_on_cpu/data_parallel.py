"""Patches that data-parallel attention (--enable-dp-attention) needs on CPU."""

from typing import Any

LONGEST_WAIT_MS = 1000
"""SGLang's watchdog must be fed now and then, so a wait for requests has to end."""


def pad_batches() -> None:
    """Define the sequence length of the dummy requests that pad a batch: 1.

    The torch_native backend lacks the method; SGLang's other CPU backends return 1.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def wait_for_requests() -> None:
    """Make the data-parallel controller block until a request arrives.

    SGLang's polls its socket in a busy loop, which takes a whole core from the ranks.
    """
    from sglang.srt.managers import data_parallel_controller as module

    receive = module.sock_recv

    def wait_and_receive(socket: Any, flags: int = 0) -> object:
        socket.poll(LONGEST_WAIT_MS)
        return receive(socket, flags=flags)

    module.sock_recv = wait_and_receive


def reduce_without_nccl() -> None:
    """Reduce-scatter with an all-reduce, as SGLang's deterministic inference does.

    SGLang's default path calls NCCL on every device.
    """
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    GroupCoordinator.reduce_scatterv = lambda self, input_, output=None, sizes=None: (
        self._deterministic_reduce_scatterv(input_, output, sizes)
    )
