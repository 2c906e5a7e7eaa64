"""Prompts, and the samples that are drawn for them: here as tokens, or where they are kept.

An episode of several turns is a sample, too: it has the rows of tokens that it trains, and what
happened in each turn.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, NewType

import numpy as np
from torch import Tensor

from mcore_rl.types.images import PromptImage

Array = np.ndarray[Any, Any]
WeightVersion = NewType("WeightVersion", int)
"""Number of loop steps that made a set of weights; 0 is the initial weights."""
WITHOUT_OUTCOME = ("env_error", "aborted")
"""Ends that tell nothing of the policy: such an episode is left out of its group."""
CUT_OFF = ("length", "max_tokens", "max_turns", "deadline")
"""Why responses and episodes end before the policy ends them."""
MOST_STOPS = 32
"""Texts that may end a response, for whoever takes them from a client."""
MOST_STOP_LEN = 1024
"""Characters of such a text."""


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, stop) of a response were sampled from weights `version`."""

    start: int
    stop: int
    version: WeightVersion


@dataclass(frozen=True, eq=False)
class Row:
    """A sequence of T tokens of an episode; it trains some of these tokens.

    token_ids        int32 [T], what the engine was given and what it sampled
    is_trained       bool [T], tokens that were sampled and that no other row trains
    logprobs         float32 [T], the engine's at trained tokens, 0 elsewhere
    turn_T           int16 [T], number of the turn that sampled a trained token, -1 elsewhere
    versions         the weights that sampled the trained tokens, in positions of the row
    routed_experts   int16 [T - 1, L, K], as the engine first routed each token; None if not asked
    indexer_topk     int16 or int32 [T - 1, L, K], as the engine first chose the keys of each token;
                     see Sample
    images           those that its tokens show, in the order of their placeholders
    """

    token_ids: Array
    is_trained: Array
    logprobs: Array
    turn_T: Array
    versions: tuple[VersionSpan, ...]
    routed_experts: Tensor | None = None
    indexer_topk: Tensor | None = None
    images: tuple[PromptImage, ...] = ()

    def __post_init__(self) -> None:
        lens = {len(a) for a in (self.token_ids, self.is_trained, self.logprobs, self.turn_T)}
        assert len(lens) == 1, f"the arrays of a row have {lens} tokens"
        num_named = sum(span.stop - span.start for span in self.versions)
        assert num_named == self.num_trained, (
            f"{num_named} tokens have a version, {self.num_trained} are trained"
        )
        for name in ("routed_experts", "indexer_topk"):
            rows = getattr(self, name)
            assert rows is None or len(rows) == len(self.token_ids) - 1, (
                f"{name.replace('_', ' ')} of {len(rows)} tokens in a row of {len(self.token_ids)}"
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
    adapter        what answered in the place of the policy, whose tokens do not train; empty: the
                   policy
    versions       of the weights that drew the answer, in order
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
    adapter: str = ""
    versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class EpisodeRecord:
    """An episode: a sample of several turns.

    end       why it is over, an agents.messages.EndReason
    detail    the error that ended it, if one did
    reward    of the whole episode; includes the rewards of its turns
    metrics   numbers of the environment, by name
    images    those that its rows show, each once; () until it is read from a store, for logs
    engines   numbers of the engines that drew its turns, in the order of the turns
    """

    rows: tuple[Row, ...]
    turns: tuple[TurnRecord, ...]
    end: str
    reward: float
    detail: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    images: tuple[PromptImage, ...] = ()
    engines: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Prompt:
    """One tokenized problem; `index` is its row in the source, the same in every epoch and run.

    images     in the order of their placeholders, which are expanded in token_ids
    set_name   of a held-out prompt: its entry in eval.sets, or empty
    position   in the stream that a run trains on, where each epoch has other positions; -1: in none
    adapter    what engines answer it with, by their name; empty: the policy
    """

    index: int
    token_ids: tuple[int, ...]
    messages: tuple[Mapping[str, str], ...]
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[PromptImage, ...] = ()
    set_name: str = ""
    position: int = -1
    adapter: str = ""

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"prompt {self.index} of {self.data_source!r} has no tokens")


@dataclass(frozen=True)
class DraftCount:
    """Passes of a request in an engine that speculates.

    checked    those that checked drafts
    accepted   drafts that these accepted
    plain      passes without drafts
    rated      passes among as many requests that the engine knew what drafts gain
    gain       sum of these gains: how many times as fast tokens are drawn with drafts
    """

    checked: int = 0
    accepted: int = 0
    plain: int = 0
    rated: int = 0
    gain: float = 0.0

    def __add__(self, other: "DraftCount") -> "DraftCount":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return DraftCount(*(one + another for one, another in pairs))


@dataclass(frozen=True)
class Sample:
    """One response to one prompt, or an episode of several turns that the prompt began.

    logprobs         the engine's own, one per response token
    versions         the weights that sampled each token; the spans cover the response once
    routed_experts   int16 [prompt and response tokens except the last, L, K], the experts that the
                     engine's routers chose; None if they were not requested
    indexer_topk     int16 or int32 [the same tokens, L, K], positions of the keys that the
                     engine's indexers chose, rising, then -1 where a token sees fewer than K; None
                     if they were not requested
    experts_start    the first token that has either; 0 but in later turns of an episode
    episode          its turns, and the rows that train them. The response is then what the rows
                     train, row after row, and the text is the conversation after the prompt
    engines          numbers of the engines that drew it, in order
    drafts           version of weights -> passes of it in an engine that speculates
    """

    prompt: Prompt
    sample_index: int
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[VersionSpan, ...]
    text: str
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)
    indexer_topk: Tensor | None = field(default=None, compare=False, repr=False)
    experts_start: int = 0
    episode: EpisodeRecord | None = field(default=None, compare=False, repr=False)
    engines: tuple[int, ...] = field(default=(), compare=False)
    drafts: Mapping[WeightVersion, DraftCount] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        where = f"prompt {self.prompt.index} sample {self.sample_index}"
        num_tokens = len(self.response_ids)
        if len(self.logprobs) != num_tokens:
            raise ValueError(
                f"{where}: {num_tokens} response tokens but {len(self.logprobs)} log-probs"
            )
        edges = [0, *(edge for s in self.versions for edge in (s.start, s.stop)), num_tokens]
        if edges != sorted(edges) or edges[::2] != edges[1::2]:
            raise ValueError(
                f"{where}: version spans {self.versions} do not cover its {num_tokens} tokens once"
            )
        expected = len(self.prompt.token_ids) + num_tokens - 1 - self.experts_start
        for name in ("routed_experts", "indexer_topk"):
            rows = getattr(self, name)
            if rows is not None and len(rows) != expected:
                what = name.replace("_", " ")
                raise ValueError(f"{where}: {what} of {len(rows)} tokens, expected {expected}")

    @property
    def response_len(self) -> int:
        return len(self.response_ids)


@dataclass(frozen=True, eq=False)
class GroupLease:
    """Place of a prompt's samples; the store keeps them while something refers to the lease."""

    store: int
    group: int


@dataclass(frozen=True)
class StoredSample:
    """A sample whose tokens lie in a store, as the controller knows it; fields as in Sample.

    episode_rows   the rows of an episode; those of a single response follow from its lengths
    metrics        numbers of an episode, by name
    """

    prompt: Prompt
    sample_index: int
    response_len: int
    finish_reason: str
    versions: tuple[VersionSpan, ...]
    has_experts: bool
    lease: GroupLease = field(repr=False)
    episode_rows: tuple[RowFacts, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    has_indexer_topk: bool = False
    engines: tuple[int, ...] = field(default=(), compare=False)

    @property
    def rows(self) -> tuple[RowFacts, ...]:
        """The sequences that train the sample; none if it has no response token."""
        if self.episode_rows or not self.response_len:
            return self.episode_rows
        num_tokens = len(self.prompt.token_ids) + self.response_len
        num_images = len(self.prompt.images)
        return (RowFacts(self.sample_index, num_tokens, self.response_len, num_images=num_images),)


def list_ends(samples: Iterable[StoredSample]) -> str:
    """Return why samples ended and how many did, the most frequent reason first."""
    ends = Counter(sample.finish_reason for sample in samples)
    return ", ".join(f"{reason} {number}" for reason, number in ends.most_common())


def has_outcome(episode: EpisodeRecord) -> bool:
    """Return whether an episode tells something of the policy."""
    return episode.end not in WITHOUT_OUTCOME
