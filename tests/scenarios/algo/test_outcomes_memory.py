"""Advantages take memory for the tokens that there are, not for samples padded to the longest."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.algo import outcomes as outcomes_module
from mcore_rl.algo.lookup import advantages
from mcore_rl.algo.outcomes import Outcomes
from mcore_rl.config import AlgorithmConfig

LENS = [8] * 511 + [2000]
"""Padded to the longest, these 6,088 tokens are 1,024,000."""


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of a tensor that any operation in the block returns."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, torch.Tensor):
                self.most = max(self.most, each.numel())
        return made


def make_outcomes(lens: list[int]) -> Outcomes:
    """Return outcomes with everything that an advantage may need, in groups of 8."""
    num_samples, num_tokens = len(lens), sum(lens)
    generator = torch.Generator().manual_seed(0)
    rewards_N = torch.rand(num_samples, generator=generator, dtype=torch.float64)
    rows_R = torch.rand(6, num_tokens, generator=generator)
    return Outcomes(
        rewards_N,
        torch.arange(num_samples) // 8,
        torch.tensor(lens),
        token_rewards_R=rows_R[0].double(),
        parts=[(0.5, rewards_N), (0.5, 1 - rewards_N)],
        greedy_N=1 - rewards_N,
        energy_R=rows_R[1],
        values_R=rows_R[2],
        logprobs_R=-rows_R[3],
        ref_logprobs_R=-rows_R[4],
        teacher_logprobs_R=-rows_R[5],
    )


@pytest.mark.parametrize("name", advantages.names)
def test_no_advantage_pads_samples_to_the_longest(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes_module, "BLOCK_TOKENS", 4096)
    outcomes = make_outcomes(LENS)
    with LargestTensor() as largest:
        made = advantages[name](outcomes, AlgorithmConfig(advantage=name))
    assert made.shape == (sum(LENS),)
    # A group of 8 has at most 8 * 2,000 tokens with its padding, and a block 4,096.
    assert largest.most <= 8 * max(LENS)


MEASURED = """
import resource, sys
from tests.scenarios.algo.test_outcomes_memory import make_outcomes
from mcore_rl.algo.values import estimate_gae
lens = [8] * 4095 + [16000]
outcomes = make_outcomes(lens)
estimate_gae(make_outcomes([3, 2]), 0.99, 0.95)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
estimate_gae(outcomes, 0.99, 0.95)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_the_peak_of_gae_is_that_of_its_tokens() -> None:
    """A block takes a few times 8 MiB, 48,760 tokens 0.4 MB; padded, each tensor is 524 MB."""
    command = [sys.executable, "-c", MEASURED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 64 * 1024, "KiB"
