"""Makes outcomes of samples from the reward, group and number of tokens of each."""

from collections.abc import Sequence

import torch

from mcore_rl.algo.outcomes import Outcomes

Rows = Sequence[tuple[float, int, int]]


def outcomes_of(rows: Rows, token_rewards: Sequence[float] | None = None) -> Outcomes:
    rewards, groups, lens = zip(*rows, strict=True)
    tokens = None if token_rewards is None else torch.tensor(token_rewards, dtype=torch.float64)
    return Outcomes(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(lens), tokens
    )
