"""Sampling of tokens, with the seeds of requests and without."""

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
    """Sample in compiled code, where a C compiler is.

    With seeds SGLang computes two logarithms in double precision for each token of the vocabulary,
    and the stand-in of its hash twenty passes in numpy: 20 ms for 32 requests and 50,000 tokens,
    which take 0.7 ms here. The tokens are the same. Without seeds torch draws a random number and a
    logarithm for each token of the vocabulary.
    """
    library = load("sampling")
    if library is None:
        return
    from sglang.srt.layers import sampler

    sampler.multinomial_with_seed = seeded_sampler(library, sampler.multinomial_with_seed)
    sampler.sampling_from_probs_torch = sampler_by_share(library, sampler.sampling_from_probs_torch)


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


def sampler_by_share(library: Any, in_torch: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return SGLang's function for sampling from probabilities, without seeds in compiled code.

    `in_torch` takes seeds, other types than float32, and what is no distribution.
    """
    library.sample_by_share.restype = ctypes.c_int64

    def sampling_from_probs_torch(
        probs_NV: Tensor, sampling_seed: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        if sampling_seed is not None or probs_NV.dtype != torch.float32:
            return in_torch(probs_NV, sampling_seed, positions)
        num_rows, vocab_size = probs_NV.shape
        probs_NV = probs_NV.contiguous()
        shares_N = torch.rand(num_rows, dtype=torch.float64)
        sums_V = torch.empty(vocab_size, dtype=torch.float64)
        tokens_N = torch.empty(num_rows, dtype=torch.int64)
        num_refused = library.sample_by_share(
            ctypes.c_void_p(probs_NV.data_ptr()),
            ctypes.c_void_p(shares_N.data_ptr()),
            ctypes.c_int64(num_rows),
            ctypes.c_int64(vocab_size),
            ctypes.c_void_p(sums_V.data_ptr()),
            ctypes.c_void_p(tokens_N.data_ptr()),
        )
        return in_torch(probs_NV) if num_refused else tokens_N.to(torch.int32)

    return sampling_from_probs_torch
