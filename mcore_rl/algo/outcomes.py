"""Holds the rewards and log-probs from which advantages are computed, and sums over groups.

Axes: N samples, R response tokens of all samples laid end to end, those of a sample in the order in
which they were sampled, G groups; in a block of samples: n samples, K tokens of the longest, C
tokens of all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

BLOCK_TOKENS = 1 << 20
"""Tokens, padding included, of the samples whose rewards are summed together; 8 MiB in float64."""


@dataclass(frozen=True)
class Outcomes:
    """N samples in any order; a sample may have no response token.

    rewards_N         reward of each whole response; computations use float64
    group_N           one id per sample, equal for the samples of one prompt
    lens_N            int64, response tokens
    token_rewards_R   float64, additional reward of each token, such as a KL penalty; None means
                      zeros
    parts             (weight, values_N) of each part of the reward, if it has parts
    greedy_N          reward of the greedy response to the same prompt
    energy_R          squared norm of the gradient of each token's log-prob by the logits
    values_R          the critic's value of the state in which each token was drawn
    last_values_N     the critic's value of the state after the last token of samples that were cut
                      off, 0 of others; None: nothing follows the last token of any sample
    logprobs_R, ref_logprobs_R, teacher_logprobs_R
                      log-probs by the policy that the step starts from, the reference and the
                      teacher
    by_sample         advantages are wanted by sample, not by token
    sums              float64 [N] by field name, sums over the tokens of each sample of fields that
                      are not here
    """

    rewards_N: Tensor
    group_N: Tensor
    lens_N: Tensor
    token_rewards_R: Tensor | None = None
    parts: Sequence[tuple[float, Tensor]] = ()
    greedy_N: Tensor | None = None
    energy_R: Tensor | None = None
    values_R: Tensor | None = None
    last_values_N: Tensor | None = None
    logprobs_R: Tensor | None = None
    ref_logprobs_R: Tensor | None = None
    teacher_logprobs_R: Tensor | None = None
    by_sample: bool = False
    sums: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = [tuple(t.shape) for t in (self.rewards_N, self.group_N, self.lens_N)]
        if len(set(shapes)) != 1 or self.rewards_N.ndim != 1:
            raise ValueError(
                f"rewards, groups and lens must all be [N], are {', '.join(map(str, shapes))}"
            )
        if not self.rewards_N.isfinite().all():
            bad = self.rewards_N.isfinite().logical_not().nonzero()[:, 0].tolist()
            raise ValueError(f"rewards of samples {bad[:8]} are not finite")
        num_tokens = int(self.lens_N.sum())
        if self.token_rewards_R is not None and self.token_rewards_R.shape != (num_tokens,):
            raise ValueError(
                f"token rewards {tuple(self.token_rewards_R.shape)} for {num_tokens} tokens"
            )

    @property
    def scores_N(self) -> Tensor:
        """float64 [N], the reward of each sample plus the rewards of its tokens."""
        of_tokens_N = self.sum_of("token_rewards_R")
        rewards_N = self.rewards_N.double()
        return rewards_N if of_tokens_N is None else rewards_N + of_tokens_N

    def spread(self, values_N: Tensor) -> Tensor:
        """float32 [R], the value of each sample at all of its tokens; [N] with `by_sample`."""
        if self.by_sample:
            return values_N.float()
        return values_N.repeat_interleave(self.lens_N).float()

    def sum_of(self, field_R: str) -> Tensor | None:
        """float64 [N], the sum of a field over each sample's tokens; None if nothing is known."""
        values_R = getattr(self, field_R)
        return self.sums.get(field_R) if values_R is None else self.sums_N(values_R)

    def sums_N(self, values_R: Tensor) -> Tensor:
        """float64 [N], the sum over each sample's tokens; 0 without any."""
        return torch.segment_reduce(values_R.double(), "sum", lengths=self.lens_N)

    def last_tokens(self) -> tuple[Tensor, Tensor]:
        """Return (samples that have tokens, the index of the last token of each); both int64."""
        with_tokens = self.lens_N.nonzero()[:, 0]
        return with_tokens, self.lens_N.cumsum(0)[with_tokens] - 1

    @property
    def rewards_R(self) -> Tensor:
        """float64 [R]; the reward of the whole response comes with its last token."""
        if self.token_rewards_R is None:
            rewards_R = torch.zeros(int(self.lens_N.sum()), dtype=torch.float64)
        else:
            rewards_R = self.token_rewards_R.to(torch.float64, copy=True)
        with_tokens, last = self.last_tokens()
        rewards_R[last] += self.rewards_N.double()[with_tokens]
        return rewards_R

    def rewards_to_go(self, gamma: float) -> Tensor:
        """float64 [R]: sum over the sample's later tokens t' >= t of gamma^(t' - t) r_t'."""
        return discount_(self.rewards_R, self.lens_N, gamma)


def discount_(values_R: Tensor, lens_N: Tensor, factor: float) -> Tensor:
    """Make each value v_t of a sample v_t + factor v_(t+1) + factor^2 v_(t+2) + ...; return it.

    Works in place. Samples of similar length are computed together, k-th tokens from the ends in
    row k, in blocks of at most BLOCK_TOKENS or of one sample:

        values_R   a a a a | b b | c c c   ->   k 0   a b c
                                                  1   a b c
                                                  2   a . c
                                                  3   a . .

    So beside the values a few blocks are in memory, not all samples at the length of the longest.
    """
    longest_first = lens_N.argsort(descending=True)
    lens = lens_N[longest_first].tolist()
    ends_N = lens_N.cumsum(0)[longest_first]
    begin = 0
    while begin < len(lens) and lens[begin]:
        end = begin + max(BLOCK_TOKENS // lens[begin], 1)
        ends_n = ends_N[begin:end]
        places_Kn = ends_n - 1 - torch.arange(lens[begin])[:, None]
        has_token_Kn = places_Kn >= ends_n - lens_N[longest_first[begin:end]]
        places_C = places_Kn[has_token_Kn]
        block_Kn = values_R.new_zeros(places_Kn.shape).masked_scatter_(
            has_token_Kn, values_R[places_C]
        )
        rows = block_Kn.unbind()
        for later, row in pairwise(rows):
            row.add_(later, alpha=factor)
        values_R[places_C] = block_Kn[has_token_Kn]
        begin = end
    return values_R


@dataclass(frozen=True)
class Groups:
    """Samples by group. index_N: the group of each sample, counted from 0; sizes_G: float64, their
    sizes.
    """

    index_N: Tensor
    sizes_G: Tensor

    @staticmethod
    def from_ids(group_N: Tensor) -> "Groups":
        """Group samples with equal ids."""
        _, index_N, sizes_G = group_N.unique(return_inverse=True, return_counts=True)
        return Groups(index_N, sizes_G.double())

    @property
    def sizes_N(self) -> Tensor:
        return self.sizes_G[self.index_N]

    @property
    def members(self) -> list[list[int]]:
        """The samples of each group."""
        members: list[list[int]] = [[] for _ in self.sizes_G]
        for sample, group in enumerate(self.index_N.tolist()):
            members[group].append(sample)
        return members

    def sum(self, values_N: Tensor) -> Tensor:
        """At each sample, the sum over its group; values_N is float64 [N]."""
        sums_G = torch.zeros_like(self.sizes_G)
        return sums_G.index_add_(0, self.index_N, values_N)[self.index_N]

    def center(self, values_N: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """values - (weighted) mean of the group; float64 [N].

        Equal values give exactly 0, not rounding errors that a division by their standard deviation
        would blow up.
        """
        weights_N = torch.ones_like(values_N) if weights_N is None else weights_N
        lowest_G = torch.full_like(self.sizes_G, torch.inf)
        lowest_G = lowest_G.scatter_reduce(0, self.index_N, values_N, "amin")
        above_N = values_N - lowest_G[self.index_N]
        total_N = self.sum(weights_N)
        return above_N - self.sum(weights_N * above_N) / torch.where(total_N > 0, total_N, 1.0)

    def std(self, centered_N: Tensor) -> Tensor:
        """At each sample, the standard deviation (divided by G - 1) of its group; 0 in a group of
        one.
        """
        return (self.sum(centered_N.square()) / (self.sizes_N - 1).clamp(min=1)).sqrt()
