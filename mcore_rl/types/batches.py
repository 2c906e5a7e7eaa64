"""Batches: sequences of samples laid end to end, as tensors or by reference to their stores.

Training ranks score a batch or train on it, and report TokenScores or StepStats.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from torch import Tensor

from mcore_rl.types.images import Images
from mcore_rl.types.samples import Array, WeightVersion

T = TypeVar("T")
SumsFrom = Literal["rows", "old", "current"]
"""Where a loss gets its sums over whole samples from (algo/sample_sums.py).

rows      each row by itself: a sample has one row, or the loss takes no sums
old       the old log-probs, which the sums depend on or the current ones are equal to
current   the current log-probs, which take a forward pass before the optimizer step
"""


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
                         return that it learns. A sequence's first token was drawn in none: it has
                         the value of the state after the sequence's last token
    stale_T              bool, True on tokens sampled from other weights than those that train
    routed_experts_TLK   int16, the experts that the engine's routers chose for each token (after an
                         old pass with train.router_replay=old_pass: the trainer's); -1 if unknown,
                         meaningless in dense layers
    own_experts          those of some tokens and layers, instead of routed_experts_TLK
    indexer_topk_TLK     int32, the keys that the engine's indexers chose for each token, as
                         positions in its sequence; -1 for none
    own_keys             those of some tokens and layers, instead of indexer_topk_TLK
    held_back_T          bool, tokens whose update the policy loss holds back (algo/covariance.py)
    sum_squares_T        float32, sum of the old policy's squared probabilities; as log-probs
    turn_rewards_T       float32, an environment's reward for a turn, at the turn's last token
    turn_T               int16, the turn of an episode that sampled a token; -1 elsewhere
    router_flips_T       int32, layers in which trainer and engine chose other experts; as log-probs
    sample_N             which sequences are of the same sample, by equal numbers, which are the
                         same on all ranks; None: each is one
    sums_from            see SumsFrom; it matters only with sample_N
    is_filler            True for a batch that only keeps a rank busy; it counts nowhere
    images               the images of the sequences; None: they are text alone
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
    own_experts: "OwnChoices | None" = None
    indexer_topk_TLK: Tensor | None = None
    own_keys: "OwnChoices | None" = None
    router_flips_T: Tensor | None = None
    held_back_T: Tensor | None = None
    sum_squares_T: Tensor | None = None
    turn_rewards_T: Tensor | None = None
    turn_T: Tensor | None = None
    sample_N: tuple[int, ...] | None = None
    sums_from: SumsFrom = "current"
    is_filler: bool = False
    images: Images | None = None

    def __post_init__(self) -> None:
        num_tokens = sum(self.lens_N)
        if self.images is not None and len(self.images.nums_N) != len(self.lens_N):
            raise ValueError(
                f"TrainBatch.images is of {len(self.images.nums_N)} sequences, lens_N names"
                f" {len(self.lens_N)}"
            )
        for name, value in self.token_fields().items():
            if len(value) != num_tokens or value.dim() != len(name.rpartition("_")[2]):
                raise ValueError(
                    f"TrainBatch.{name} has {tuple(value.shape)}, lens_N sum to {num_tokens}"
                )

    @property
    def names_experts(self) -> bool:
        return self.routed_experts_TLK is not None or self.own_experts is not None

    @property
    def names_keys(self) -> bool:
        return self.indexer_topk_TLK is not None or self.own_keys is not None

    def token_fields(self) -> dict[str, Tensor]:
        """Return the fields that have a row per token and are not None."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class OwnChoices:
    """Experts or keys that were chosen for the tokens and layers that a rank computes with.

    tokens_M      int64, indices of the tokens in the micro-batch, in rising order
    choices_MLK   as TrainBatch.routed_experts_TLK or TrainBatch.indexer_topk_TLK
    layers        the layers that choices_MLK has; empty: all
    """

    tokens_M: Tensor
    choices_MLK: Tensor
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class StoredColumn:
    """A field of a batch whose values lie in the sample stores, under this name."""

    name: str


Values = TypeVar("Values", bound=Tensor | StoredColumn, covariant=True)
"""A field of a batch's tokens: the tensor itself, or the column that keeps it."""


@dataclass(frozen=True)
class StoredBatch:
    """A TrainBatch whose tokens lie in stores; batches/assembly.py makes it of what they hold.

    store_N, group_N, index_N   int64, the samples: store, group in that store, row in the group
    sampled_lens_N              int64, tokens that may be trained: the last ones of each sequence,
                                or those that loss_mask_T names
    sample_N, sums_from         as in TrainBatch; sample_N is int64
    is_trained_N                bool, False for sequences that are left out of the loss
    parent_N, start_N           int64, RowFacts.parent and start of each row
    version                     tokens sampled from other weights are stale; None: no marks
    parts                       sequences of each micro-batch, in their order; 0 stands for a filler
    loss_weights_N, advantages_N   float32, the value at each trained token of a sequence
    nums_images_N               int64, images of each sequence; None: they are text alone
    """

    store_N: Array
    group_N: Array
    index_N: Array
    sampled_lens_N: Array
    lens_N: tuple[int, ...]
    is_trained_N: Array
    parent_N: Array | None = None
    start_N: Array | None = None
    sample_N: Array | None = None
    sums_from: SumsFrom = "current"
    version: WeightVersion | None = None
    parts: tuple[int, ...] = ()
    loss_weights_N: Array | None = None
    advantages_N: Array | None = None
    nums_images_N: Array | None = None
    advantages_T: StoredColumn | None = None
    old_logprobs_T: StoredColumn | None = None
    ref_logprobs_T: StoredColumn | None = None
    teacher_logprobs_T: StoredColumn | None = None
    values_T: StoredColumn | None = None
    returns_T: StoredColumn | None = None
    routed_experts_TLK: StoredColumn | None = None
    indexer_topk_TLK: StoredColumn | None = None
    router_flips_T: StoredColumn | None = None
    held_back_T: StoredColumn | None = None
    sum_squares_T: StoredColumn | None = None
    loss_mask_T: StoredColumn | None = None
    turn_rewards_T: StoredColumn | None = None
    turn_T: StoredColumn | None = None


TokenWork = Callable[[TrainBatch], tuple[TrainBatch, T]]
"""Sets fields of a batch with its tokens, and returns something small beside it."""


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


FailedSaves = tuple[tuple[str, str], ...]
"""(folder, reason) of saves that ended without a checkpoint."""


@dataclass(frozen=True)
class RankSeconds:
    """Seconds of each rank's own work, by phase and rank, and the ranks' pipeline stages."""

    stages: Sequence[int]
    seconds: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class StepStats:
    """The report of one optimizer step, equal on every rank that has one.

    failed_saves   those since the last report
    ranks          the work of all ranks since the last report; None: unknown
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    failed_saves: FailedSaves = ()
    ranks: RankSeconds | None = None


@dataclass(frozen=True)
class RankCoordinate:
    """A rank's index in each parallel dimension; `owns_output` is True on one rank per `dp`."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    owns_output: bool


@dataclass(frozen=True)
class RankStep:
    """A rank's answer to an optimizer step.

    stats     None on ranks that own no output
    seconds   of the rank's own work since its last answer, by phase
    stage     the rank's pipeline stage
    """

    stats: StepStats | None
    seconds: Mapping[str, float]
    stage: int
