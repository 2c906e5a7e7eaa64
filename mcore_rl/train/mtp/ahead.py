"""Finds the tokens ahead that layers for multi-token prediction (MTP) read and predict.

The first layer reads the hidden state of a token and the token after it, and predicts the one after
that; each further layer is one token ahead. No layer looks beyond a sequence:

    tokens of two sequences      a b c d | e f g
    the first layer reads        b c d . | f g .      "." is none; token 0 is read in its place
    and predicts                 c d . . | g . .

It learns only where the predicted token is one that the policy is trained on, such as those of a
response.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mcore_rl.device import on_device
from mcore_rl.train.logprobs import select_scored_rows
from mcore_rl.train.packing import RankBatch, find_ahead
from mcore_rl.types import TrainBatch


@dataclass(frozen=True)
class Ahead:
    """The tokens that one layer reads and predicts in a rank's part of a micro-batch.

    inputs_T    int64, ids of the tokens that are read beside hidden states
    rows_R      int64, rising, the local tokens with a prediction to learn; at least one
    labels_R    int64, ids of the predicted tokens
    targets_R   int64, their indices in the whole micro-batch
    learns_R    bool, False on a row that stands in where there is none to learn
    count       rows to learn
    """

    inputs_T: Tensor
    rows_R: Tensor
    labels_R: Tensor
    targets_R: Tensor
    learns_R: Tensor
    count: int

    def on_device(self) -> "Ahead":
        names = ("inputs_T", "rows_R", "labels_R", "targets_R", "learns_R")
        return replace(self, **{name: on_device(getattr(self, name)) for name in names})


@dataclass(frozen=True)
class DraftTargets:
    """The same of all layers, and where the policy's own logits are.

    layers             of each MTP layer
    scored_targets_R   int64, the token in the whole micro-batch that each row of the policy's
                       logits predicts; -1 for none
    num_tokens         tokens of the whole micro-batch
    """

    layers: tuple[Ahead, ...]
    scored_targets_R: Tensor
    num_tokens: int

    def on_device(self) -> "DraftTargets":
        layers = tuple(layer.on_device() for layer in self.layers)
        return replace(self, layers=layers, scored_targets_R=on_device(self.scored_targets_R))


def find_draft_targets(batch: TrainBatch, own: RankBatch, num_layers: int) -> DraftTargets:
    """Return the targets of MTP layers in a rank's part of a micro-batch, in host memory."""
    return DraftTargets(
        tuple(_look_ahead(batch, own, layer + 1) for layer in range(num_layers)),
        own.targets_T[select_scored_rows(own.batch)],
        len(batch.token_ids_T),
    )


def count_targets(batches: Sequence[DraftTargets]) -> list[int]:
    """Return the predictions to learn of each layer, over some micro-batches of a rank."""
    layers = zip(*(batch.layers for batch in batches), strict=True)
    return [sum(ahead.count for ahead in of_layer) for of_layer in layers]


def _look_ahead(batch: TrainBatch, own: RankBatch, distance: int) -> Ahead:
    read_T = find_ahead(batch.lens_N, own, distance)
    targets_T = find_ahead(batch.lens_N, own, distance + 1)
    assert batch.loss_mask_T is not None, "the micro-batch has no loss mask"
    learns_T = (targets_T >= 0) & batch.loss_mask_T[targets_T.clamp(min=0)]
    learns_T &= own.sources_T >= 0  # neither padding nor a filler
    rows_R = learns_T.nonzero()[:, 0]
    count = len(rows_R)
    if not count:
        rows_R = rows_R.new_zeros(1)
    index_R = targets_T[rows_R].clamp(min=0)
    return Ahead(
        inputs_T=torch.where(read_T >= 0, batch.token_ids_T[read_T.clamp(min=0)], 0),
        rows_R=rows_R,
        labels_R=batch.token_ids_T[index_R],
        targets_R=index_R,
        learns_R=learns_T[rows_R],
        count=count,
    )
