"""The values that flow through the loop: prompts become samples, samples become train batches.

Axis legend for tensor names, here and everywhere: N sequences, T tokens of all sequences
concatenated, P prompts, G samples of one prompt (its group), V vocabulary, L layers, K experts of a
token in a layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NewType

import numpy as np
from torch import Tensor

Array = np.ndarray[Any, Any]
WeightVersion = NewType("WeightVersion", int)
"""Number of loop steps that made a set of weights; 0 is the initial weights."""


@dataclass(frozen=True)
class Prompt:
    """One tokenized problem; `index` is its row in the source, the same in every epoch and run."""

    index: int
    token_ids: tuple[int, ...]
    messages: tuple[Mapping[str, str], ...]
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"prompt {self.index} of {self.data_source!r} has no tokens")


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, stop) of a response were sampled from weights `version`."""

    start: int
    stop: int
    version: WeightVersion


@dataclass(frozen=True)
class Sample:
    """One response to one prompt.

    logprobs         the engine's own, one per response token
    versions         the weights that sampled each token; the spans cover the response once
    routed_experts   int16 [prompt and response tokens except the last, L, K], the experts that the
                     engine's routers chose; None if they were not requested
    """

    prompt: Prompt
    sample_index: int
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[VersionSpan, ...]
    text: str
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)

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
        expected = len(self.prompt.token_ids) + num_tokens - 1
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
    """A sample whose tokens lie in a store, as the controller knows it; fields as in Sample."""

    prompt: Prompt
    sample_index: int
    response_len: int
    finish_reason: str
    versions: tuple[VersionSpan, ...]
    has_experts: bool
    lease: GroupLease = field(repr=False)


AnySample = Sample | StoredSample


@dataclass(frozen=True)
class TrainBatch:
    """Sequences of unequal length, concatenated.

    token_ids_T          int64, prompt and response of each sequence
    loss_mask_T          bool, True on tokens whose log-prob is trained (never a sequence's first)
    lens_N               tokens per sequence; they sum to T
    loss_weights_T       float32; the loss of an optimizer step is sum(weight * token loss), so it
                         does not depend on how sequences are spread over micro-batches and ranks
    advantages_T, rollout_logprobs_T, old_logprobs_T, ref_logprobs_T, teacher_logprobs_T
                         float32; entry t of log-probs is log p(token t | tokens before it)
    values_T, returns_T  float32, the critic's value of the state that the token was drawn in; the
                         return that it learns
    stale_T              bool, True on tokens sampled from other weights than those that train
    routed_experts_TLK   int16, the experts that the engine's routers chose for each token (after an
                         old pass with train.router_replay=old_pass: the trainer's); -1 if unknown,
                         meaningless in dense layers
    own_experts          those of some tokens and layers, instead of routed_experts_TLK
    held_back_T          bool, tokens whose update the policy loss holds back (algo/covariance.py)
    sum_squares_T        float32, sum of the old policy's squared probabilities; as log-probs
    router_flips_T       int32, layers in which trainer and engine chose other experts; as log-probs
    is_filler            True for a batch that only keeps a rank busy; it counts nowhere
    """

    token_ids_T: Tensor
    loss_mask_T: Tensor
    lens_N: tuple[int, ...]
    loss_weights_T: Tensor | None = None
    advantages_T: Tensor | None = None
    rollout_logprobs_T: Tensor | None = None
    old_logprobs_T: Tensor | None = None
    ref_logprobs_T: Tensor | None = None
    teacher_logprobs_T: Tensor | None = None
    values_T: Tensor | None = None
    returns_T: Tensor | None = None
    stale_T: Tensor | None = None
    routed_experts_TLK: Tensor | None = None
    own_experts: "OwnExperts | None" = None
    router_flips_T: Tensor | None = None
    held_back_T: Tensor | None = None
    sum_squares_T: Tensor | None = None
    is_filler: bool = False

    def __post_init__(self) -> None:
        num_tokens = sum(self.lens_N)
        for name, value in self.token_fields().items():
            if len(value) != num_tokens or value.dim() != len(name.rpartition("_")[2]):
                raise ValueError(
                    f"TrainBatch.{name} has {tuple(value.shape)}, lens_N sum to {num_tokens}"
                )

    @property
    def names_experts(self) -> bool:
        return self.routed_experts_TLK is not None or self.own_experts is not None

    def token_fields(self) -> dict[str, Tensor]:
        """Return the fields that have a row per token and are not None."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class OwnExperts:
    """The routed experts of the tokens and layers that a rank computes with.

    tokens_M      int64, indices of the tokens in the micro-batch, in rising order
    experts_MLK   int16, as TrainBatch.routed_experts_TLK
    layers        the layers that experts_MLK has; empty: all
    """

    tokens_M: Tensor
    experts_MLK: Tensor
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class StoredColumn:
    """A field of a batch whose values lie in the sample stores, under this name."""

    name: str


@dataclass(frozen=True)
class StoredBatch:
    """A TrainBatch whose tokens lie in stores; data/assembly.py makes it of what they hold.

    store_N, group_N, index_N   int64, the samples: store, group in that store, place in the group
    prompt_lens_N               int64, tokens
    is_trained_N                bool, False for sequences that are left out of the loss
    version                     tokens sampled from other weights are stale; None: no marks
    parts                       sequences of each micro-batch, in their order; 0 stands for a filler
    loss_weights_N, advantages_N   float32, the value at each trained token of a sequence
    """

    store_N: Array
    group_N: Array
    index_N: Array
    prompt_lens_N: Array
    lens_N: tuple[int, ...]
    is_trained_N: Array
    version: WeightVersion | None = None
    parts: tuple[int, ...] = ()
    loss_weights_N: Array | None = None
    advantages_N: Array | None = None
    advantages_T: StoredColumn | None = None
    old_logprobs_T: StoredColumn | None = None
    ref_logprobs_T: StoredColumn | None = None
    teacher_logprobs_T: StoredColumn | None = None
    values_T: StoredColumn | None = None
    returns_T: StoredColumn | None = None
    routed_experts_TLK: StoredColumn | None = None
    router_flips_T: StoredColumn | None = None
    held_back_T: StoredColumn | None = None
    sum_squares_T: StoredColumn | None = None


AnyBatch = TrainBatch | StoredBatch


@dataclass(frozen=True)
class LogprobOptions:
    """How a forward pass scores the tokens of a batch.

    reference     score with the reference policy's weights instead of the trained ones
    temperature   divides the logits; None means the rollout's, which the trainer's player fills in
    sum_squares   also return TokenScores.sum_squares_T
    """

    reference: bool = False
    temperature: float | None = None
    sum_squares: bool = False


@dataclass(frozen=True)
class TokenScores:
    """Results of a forward pass, as fields of a batch: tensors, or columns of a StoredBatch."""

    logprobs_T: Any
    router_flips_T: Any = None
    sum_squares_T: Any = None
    routed_experts_TLK: Any = None


@dataclass(frozen=True)
class StepStats:
    """The report of one optimizer step, equal on every rank that has one."""

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)
