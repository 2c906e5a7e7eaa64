"""Episodes of several turns: the rows of tokens that they train, and what happened in each turn."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from mcore_rl.types.arrays import Array, WeightVersion
from mcore_rl.types.images import PromptImage


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, stop) of a response were sampled from weights `version`."""

    start: int
    stop: int
    version: WeightVersion


@dataclass(frozen=True, eq=False)
class Row:
    """A sequence of an episode's tokens, T of them, some of which it trains.

    token_ids        int32 [T], what the engine was given and what it sampled
    is_trained       bool [T], tokens that were sampled and that no other row trains
    logprobs         float32 [T], the engine's at trained tokens, 0 elsewhere
    turn_T           int16 [T], number of the turn that sampled a trained token, -1 elsewhere
    versions         the weights that sampled the trained tokens, in positions of the row
    routed_experts   int16 [T - 1, L, K], as the engine first routed each token; None if not asked
    images           those that its tokens show, in the order of their placeholders
    """

    token_ids: Array
    is_trained: Array
    logprobs: Array
    turn_T: Array
    versions: tuple[VersionSpan, ...]
    routed_experts: Tensor | None = None
    images: tuple[PromptImage, ...] = ()

    def __post_init__(self) -> None:
        lens = {len(a) for a in (self.token_ids, self.is_trained, self.logprobs, self.turn_T)}
        assert len(lens) == 1, f"the arrays of a row have {lens} tokens"
        num_named = sum(span.stop - span.start for span in self.versions)
        assert num_named == self.num_trained, (
            f"{num_named} tokens have a version, {self.num_trained} are trained"
        )
        if self.routed_experts is not None:
            num_routed = len(self.routed_experts)
            assert num_routed == len(self.token_ids) - 1, (
                f"routed experts of {num_routed} tokens in a row of {len(self.token_ids)}"
            )

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.is_trained))


@dataclass(frozen=True)
class RowFacts:
    """A row as the controller knows it: its number in its group, and how many tokens it has.

    parent   number of a row of the group whose tokens it begins with; -1: none
    start    first token to compute if the parent is computed with it (batches/shared_prefixes.py)
    """

    index: int
    num_tokens: int
    num_trained: int
    parent: int = -1
    start: int = 0
    num_images: int = 0


@dataclass(frozen=True)
class TurnRecord:
    """One turn, for rewards and logs.

    parent         the turn whose tokens come before; None: the conversation was laid out anew
    fork           why this turn does not simply follow the one before; empty if it does
    messages       what was said since the parent's answer; all, if there is no parent
    answer         the policy's message
    num_tokens     sampled ones
    calls          the status of each attempt to call a tool
    """

    number: int
    parent: int | None
    fork: str
    messages: tuple[Mapping[str, Any], ...]
    answer: Mapping[str, Any]
    num_tokens: int
    finish_reason: str
    reward: float = 0.0
    calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class EpisodeRecord:
    """An episode: a sample of several turns.

    end       why it is over, an agents.messages.EndReason
    detail    the error that ended it, if one did
    reward    of the whole episode, that of its turns included
    metrics   numbers of the environment, by name
    images    those that its rows show, each once; () until it is read from a store, for logs
    """

    rows: tuple[Row, ...]
    turns: tuple[TurnRecord, ...]
    end: str
    reward: float
    detail: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    images: tuple[PromptImage, ...] = ()


WITHOUT_OUTCOME = ("env_error", "aborted")
"""Ends that tell nothing of the policy: such an episode is left out of its group."""
CUT_OFF = ("length", "max_tokens", "max_turns", "deadline")
"""Why responses and episodes end before the policy ends them."""


def has_outcome(episode: EpisodeRecord) -> bool:
    """Return whether an episode tells something of the policy."""
    return episode.end not in WITHOUT_OUTCOME
