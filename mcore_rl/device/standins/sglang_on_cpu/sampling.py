"""Sampling that repeats with a request's seed."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_rl.device.native import load


def allow_seeded_sampling() -> None:
    """Accept --enable-deterministic-inference on CPU, which makes SGLang honor sampling_seed.

    SGLang rejects the option with torch_native attention because its batch-invariant kernels are
    written in triton.
    """
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None


def sample_in_one_pass() -> None:
    """Sample with seeds in compiled code, where a C compiler is.

    SGLang computes two logarithms in double precision for each token of the vocabulary, and the
    stand-in of its hash twenty passes in numpy: 20 ms for 32 requests and 50,000 tokens, which take
    0.7 ms here. The tokens are the same.
    """
    library = load("sampling")
    if library is None:
        return
    from sglang.srt.layers import sampler

    sampler.multinomial_with_seed = seeded_sampler(library, sampler.multinomial_with_seed)


def seeded_sampler(library: Any, in_torch: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return SGLang's function for seeded sampling; `in_torch` takes other types than float32."""
    library.sample_seeded.restype = None

    def multinomial_with_seed(logprobs_NV: Tensor, seed_N: Tensor, positions_N: Tensor) -> Tensor:
        if logprobs_NV.dtype != torch.float32:
            return in_torch(logprobs_NV, seed_N, positions_N)
        num_rows, vocab_size = logprobs_NV.shape
        tensors = (logprobs_NV.contiguous(), seed_N.to(torch.int64), positions_N.to(torch.int64))
        tokens_N1 = torch.empty(num_rows, 1, dtype=torch.int64)
        library.sample_seeded(
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
            ctypes.c_int64(num_rows),
            ctypes.c_int64(vocab_size),
            ctypes.c_void_p(tokens_N1.data_ptr()),
        )
        return tokens_N1

    return multinomial_with_seed
