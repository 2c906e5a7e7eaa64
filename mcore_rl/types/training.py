"""CollectorCommands to training ranks, and their reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from mcore_rl.types.batches import StoredColumn

Values = TypeVar("Values", bound=Tensor | StoredColumn, covariant=True)
"""A field of a batch's tokens: the tensor itself, or the column that keeps it."""


@dataclass(frozen=True)
class LogprobOptions:
    """How a forward pass scores the tokens of a batch.

    reference     score with the reference policy's weights instead of the trained ones
    temperature   divides the logits; None means the rollout's, which PackedTrainer fills in
    sum_squares   also return TokenScores.sum_squares_T
    """

    reference: bool = False
    temperature: float | None = None
    sum_squares: bool = False


@dataclass(frozen=True)
class TokenScores(Generic[Values]):
    """Results of a forward pass, as fields of a batch: tensors, or columns of a StoredBatch."""

    logprobs_T: Values
    router_flips_T: Values | None = None
    sum_squares_T: Values | None = None
    routed_experts_TLK: Values | None = None


@dataclass(frozen=True)
class StepStats:
    """The report of one optimizer step, equal on every rank that has one."""

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)
