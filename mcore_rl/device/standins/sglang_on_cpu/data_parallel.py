"""What data-parallel attention (--enable-dp-attention) needs on CPU."""

from typing import Any

LONGEST_WAIT_MS = 1000
"""Its watchdog has to hear of the process now and then."""


def pad_batches() -> None:
    """Say which length the requests have that fill a batch up.

    The torch_native backend lacks the method; the other CPU backends answer 1.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def wait_for_requests() -> None:
    """Let the process that deals requests out wait for one.

    SGLang's asks its socket without end, which takes a whole core from the ranks.
    """
    from sglang.srt.managers import data_parallel_controller as module

    receive = module.sock_recv

    def wait_and_receive(socket: Any, flags: int = 0) -> object:
        socket.poll(LONGEST_WAIT_MS)
        return receive(socket, flags=flags)

    module.sock_recv = wait_and_receive


def reduce_without_nccl() -> None:
    """Sum tokens over ranks and keep a rank's own by all-reduce, as deterministic inference does.

    SGLang's other way asks NCCL, whatever the device.
    """
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    GroupCoordinator.reduce_scatterv = lambda self, input_, output=None, sizes=None: (
        self._deterministic_reduce_scatterv(input_, output, sizes)
    )
