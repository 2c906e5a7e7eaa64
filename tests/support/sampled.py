"""Prompts of random tokens, and how far samples' log-probs are from transformers'."""

import torch
from transformers import Qwen3MoeForCausalLM

from mcore_rl.types import Prompt, Sample
from tests.support.engines import VOCAB_SIZE


def make_prompts(num_prompts: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    lens = torch.randint(1, 40, (num_prompts,), generator=generator).tolist()
    return [
        Prompt(
            i,
            tuple(torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist()),
            (),
            "test",
            None,
        )
        for i, n in enumerate(lens)
    ]


def logprob_error(
    model: Qwen3MoeForCausalLM, samples: list[Sample], temperature: float = 1.0
) -> float:
    """Largest difference between the samples' log-probs and transformers'."""
    worst = 0.0
    for sample in samples:
        ids = torch.tensor([*sample.prompt.token_ids, *sample.response_ids])
        with torch.no_grad():
            logits = (
                model(ids[None]).logits[0, len(sample.prompt.token_ids) - 1 : -1].float()
                / temperature
            )
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.response_ids)[:, None])[
            :, 0
        ]
        worst = max(worst, (expected - torch.tensor(sample.logprobs)).abs().max().item())
    return worst
