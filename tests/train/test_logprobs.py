"""Vocab-parallel log-probs, entropies and gradients are those of log_softmax on one rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.device import row_softmax
from mcore_rl.train import logprobs as module
from mcore_rl.train.logprobs import (
    VocabParallelSoftmax,
    vocab_parallel_logprobs,
    vocab_parallel_scores,
)
from tests.support.distributed import join_gloo, run_alone, run_ranks
from tests.support.triton_code import needs_triton, run_with_triton

CASES = [(7, 8, 1.0, 1024), (10, 16, 0.7, 4), (3, 16, 1.3, 1)]
"""(vocabulary, padded vocabulary, temperature, chunk); in the last, rank 1 of 2 holds only padding.
"""
NUM_TOKENS = 6


def make_case(vocab: int, padded: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    logits_TV = torch.randn(NUM_TOKENS, padded, generator=generator) * 3
    targets_T = torch.randint(0, vocab, (NUM_TOKENS,), generator=generator)
    weights = torch.randn(2, NUM_TOKENS, generator=generator)
    return logits_TV, targets_T, weights[0], weights[1]


def parallel(rank: int, world_size: int, port: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    join_gloo(rank, world_size, port)
    assert dist.group.WORLD is not None
    results = []
    for vocab, padded, temperature, chunk in CASES:
        softmax = VocabParallelSoftmax(dist.group.WORLD, vocab, temperature, chunk)
        logits_TV, targets_T, w_logprob, w_entropy = make_case(vocab, padded)
        mine = logits_TV.chunk(world_size, -1)[rank].clone().requires_grad_()
        before = mine.detach().clone()
        logprobs, entropy = vocab_parallel_logprobs(mine, targets_T, softmax)
        ((logprobs * w_logprob).sum() + (entropy * w_entropy).sum()).backward()
        assert torch.equal(mine.detach(), before)
        assert mine.grad is not None
        scores, squares = vocab_parallel_scores(mine, targets_T, softmax, sum_squares=True)
        assert torch.equal(scores, logprobs.detach()) and squares is not None
        assert torch.equal(mine.detach(), before) and not squares.requires_grad
        alone, no_squares = vocab_parallel_scores(mine, targets_T, softmax, sum_squares=False)
        assert torch.equal(alone, scores) and no_squares is None
        results.append((logprobs.detach(), entropy.detach(), mine.grad, squares))
    return results


def parallel_by_kernels(rank: int, world_size: int, port: int) -> Any:
    """Do the same by the kernels of a GPU; Triton interprets them if it is told so."""
    module.has_kernel = lambda tensor: True
    row_softmax._BLOCK = 4
    return parallel(rank, world_size, port)


def check_parallel(ranks: list[Any]) -> None:
    """Compare what all ranks computed with log_softmax."""
    for i, (vocab, padded, temperature, _) in enumerate(CASES):
        logits_TV, targets_T, w_logprob, w_entropy = make_case(vocab, padded)
        logits_TV.requires_grad_()
        log_p = (logits_TV[:, :vocab] / temperature).log_softmax(-1)
        logprobs = log_p.gather(-1, targets_T[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        ((logprobs * w_logprob).sum() + (entropy * w_entropy).sum()).backward()
        for rank in ranks:
            torch.testing.assert_close(rank[i][0], logprobs.detach(), rtol=0, atol=2e-6)
            torch.testing.assert_close(rank[i][1], entropy.detach(), rtol=0, atol=2e-6)
            torch.testing.assert_close(
                rank[i][3], log_p.exp().square().sum(-1).detach(), rtol=0, atol=2e-6
            )
        gradient = torch.cat([rank[i][2] for rank in ranks], -1)
        torch.testing.assert_close(gradient, logits_TV.grad, rtol=0, atol=2e-6)


@pytest.mark.gloo
@pytest.mark.parametrize("world_size", [1, 2])
def test_against_log_softmax(world_size: int) -> None:
    check_parallel(run_ranks(parallel, world_size))


@needs_triton
@pytest.mark.gloo
@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param("[ours.parallel_by_kernels(0, 1, find_free_port('127.0.0.1'))]", id="1"),
        pytest.param("ours.run_ranks(ours.parallel_by_kernels, 2)", id="2", marks=pytest.mark.slow),
    ],
)
def test_kernels_against_log_softmax(ranks: str) -> None:
    """A lone rank computes in the process that checks it: to import takes longest."""
    run_with_triton(
        "from mcore_rl.process.network import find_free_port\n"
        "from tests.support import distributed\n"
        "distributed.PRELOAD[:] = ['tests.train.test_logprobs']\n"
        "from tests.train import test_logprobs as ours\n"
        "if __name__ == '__main__':\n"
        f"    ours.check_parallel({ranks})\n",
        TRITON_INTERPRET="1",
    )


def chunked(chunk: int, case: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Return log-probs, entropies and gradient of bfloat16 logits."""
    logits_TV, targets_T, w_logprob, w_entropy = case
    logits_TV = logits_TV.bfloat16().requires_grad_()
    assert dist.group.WORLD is not None
    softmax = VocabParallelSoftmax(dist.group.WORLD, 300, 0.9, chunk)
    logprobs, entropy = vocab_parallel_logprobs(logits_TV, targets_T, softmax)
    ((logprobs * w_logprob).sum() + (entropy * w_entropy).sum()).backward()
    assert logits_TV.grad is not None and logits_TV.grad.dtype == torch.bfloat16
    return [logprobs.detach(), entropy.detach(), logits_TV.grad]


def bits_of_chunks() -> list[list[Tensor]]:
    case = make_case(300, 304)
    return [chunked(chunk, case) for chunk in (1, 4, 6, 1024)]


def test_the_size_of_chunks_changes_no_bit() -> None:
    first, *others = run_alone(bits_of_chunks)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def largest_tensor(chunk: int) -> int:
    """Return the elements of the largest float32 tensor made on the way there and back."""
    case = make_case(300, 304)
    seen: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dtype == torch.float32:
                seen.append(out.numel())
            return out

    with Watch():
        chunked(chunk, case)
    return max(seen)


def largest_tensors() -> list[int]:
    return [largest_tensor(chunk) for chunk in (2, 6)]


def test_no_more_than_a_chunk_is_in_float32_at_once() -> None:
    assert run_alone(largest_tensors) == [2 * 304, NUM_TOKENS * 304]
