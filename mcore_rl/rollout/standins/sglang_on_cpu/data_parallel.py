"""What data-parallel attention (--enable-dp-attention) needs on CPU."""


def pad_batches() -> None:
    """Say which length the requests have that fill a batch up.

    The torch_native backend lacks the method; the other CPU backends answer 1.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def reduce_without_nccl() -> None:
    """Sum tokens over ranks and keep a rank's own by all-reduce, as deterministic inference does.

    SGLang's other way asks NCCL, whatever the device.
    """
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    GroupCoordinator.reduce_scatterv = lambda self, input_, output=None, sizes=None: (
        self._deterministic_reduce_scatterv(input_, output, sizes)
    )
