"""Prompts, and the samples that are drawn for them: here as tokens, or where they are kept."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mcore_rl.types.episodes import EpisodeRecord, RowFacts, VersionSpan
from mcore_rl.types.images import PromptImage


@dataclass(frozen=True)
class Prompt:
    """One tokenized problem; `index` is its row in the source, the same in every epoch and run.

    images   in the order of their placeholders, which are expanded in token_ids
    """

    index: int
    token_ids: tuple[int, ...]
    messages: tuple[Mapping[str, str], ...]
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[PromptImage, ...] = ()

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"prompt {self.index} of {self.data_source!r} has no tokens")


@dataclass(frozen=True)
class Sample:
    """One response to one prompt, or an episode of several turns that the prompt began.

    logprobs         the engine's own, one per response token
    versions         the weights that sampled each token; the spans cover the response once
    routed_experts   int16 [prompt and response tokens except the last, L, K], the experts that the
                     engine's routers chose; None if they were not requested
    experts_start    the first token that has some; 0 but in later turns of an episode
    episode          its turns, and the rows that train them. The response is then what the rows
                     train, row after row, and the text is the conversation after the prompt
    """

    prompt: Prompt
    sample_index: int
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[VersionSpan, ...]
    text: str
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)
    experts_start: int = 0
    episode: EpisodeRecord | None = field(default=None, compare=False, repr=False)

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
        rows = self.routed_experts
        expected = len(self.prompt.token_ids) + num_tokens - 1 - self.experts_start
        if rows is not None and len(rows) != expected:
            raise ValueError(f"{where}: routed experts of {len(rows)} tokens, expected {expected}")

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

    @property
    def rows(self) -> tuple[RowFacts, ...]:
        """The sequences that train the sample; none if it has no response token."""
        if self.episode_rows or not self.response_len:
            return self.episode_rows
        num_tokens = len(self.prompt.token_ids) + self.response_len
        num_images = len(self.prompt.images)
        return (RowFacts(self.sample_index, num_tokens, self.response_len, num_images=num_images),)
