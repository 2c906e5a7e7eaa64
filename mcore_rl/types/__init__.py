"""The values that flow through the loop: prompts become samples, samples become train batches.

Axis legend for tensor names, here and everywhere: N sequences, T tokens of all sequences
concatenated, P prompts, G samples of one prompt (its group), V vocabulary, L layers, K experts of a
token in a layer.
"""

from mcore_rl.types.batches import (
    FailedSaves,
    LogprobOptions,
    OwnChoices,
    RankCoordinate,
    RankSeconds,
    RankStep,
    StepStats,
    StoredBatch,
    StoredColumn,
    SumsFrom,
    TokenScores,
    TokenWork,
    TrainBatch,
)
from mcore_rl.types.images import Clip, Images, Patches, PromptImage
from mcore_rl.types.samples import (
    CUT_OFF,
    WITHOUT_OUTCOME,
    Array,
    DraftCount,
    EpisodeRecord,
    GroupLease,
    Prompt,
    Row,
    RowFacts,
    Sample,
    StoredSample,
    TurnRecord,
    VersionSpan,
    WeightVersion,
    has_outcome,
    list_ends,
)

__all__ = [
    "CUT_OFF",
    "WITHOUT_OUTCOME",
    "Array",
    "Clip",
    "DraftCount",
    "EpisodeRecord",
    "FailedSaves",
    "GroupLease",
    "Images",
    "LogprobOptions",
    "OwnChoices",
    "Patches",
    "Prompt",
    "PromptImage",
    "RankCoordinate",
    "RankSeconds",
    "RankStep",
    "Row",
    "RowFacts",
    "Sample",
    "StepStats",
    "StoredBatch",
    "StoredColumn",
    "StoredSample",
    "SumsFrom",
    "TokenScores",
    "TokenWork",
    "TrainBatch",
    "TurnRecord",
    "VersionSpan",
    "WeightVersion",
    "has_outcome",
    "list_ends",
]
