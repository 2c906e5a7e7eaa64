"""Vocab-parallel log-probs, entropies and gradients are those of log_softmax on one rank."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.train.logprobs import vocab_parallel_logprobs, vocab_parallel_sum_squares
from tests.support.distributed import run_ranks

CASES = [(7, 8, 1.0), (10, 16, 0.7), (3, 16, 1.3)]
"""(vocabulary, padded vocabulary, temperature); in the last, rank 1 of 2 holds only padding."""
NUM_TOKENS = 6


def make_case(vocab: int, padded: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    logits_TV = torch.randn(NUM_TOKENS, padded, generator=generator) * 3
    targets_T = torch.randint(0, vocab, (NUM_TOKENS,), generator=generator)
    weights = torch.randn(2, NUM_TOKENS, generator=generator)
    return logits_TV, targets_T, weights[0], weights[1]


def parallel(rank: int, world_size: int, port: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    assert dist.group.WORLD is not None
    results = []
    for vocab, padded, temperature in CASES:
        logits_TV, targets_T, w_logprob, w_entropy = make_case(vocab, padded)
        mine = logits_TV.chunk(world_size, -1)[rank].clone().requires_grad_()
        before = mine.detach().clone()
        logprobs, entropy = vocab_parallel_logprobs(
            mine, targets_T, dist.group.WORLD, vocab, temperature
        )
        ((logprobs * w_logprob).sum() + (entropy * w_entropy).sum()).backward()
        assert torch.equal(mine.detach(), before)
        assert mine.grad is not None
        squares = vocab_parallel_sum_squares(mine, dist.group.WORLD, vocab, temperature)
        assert torch.equal(mine.detach(), before) and not squares.requires_grad
        results.append((logprobs.detach(), entropy.detach(), mine.grad, squares))
    return results


@pytest.mark.gloo
@pytest.mark.parametrize("world_size", [1, 2])
def test_against_log_softmax(world_size: int) -> None:
    ranks = run_ranks(parallel, world_size)
    for i, (vocab, padded, temperature) in enumerate(CASES):
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
