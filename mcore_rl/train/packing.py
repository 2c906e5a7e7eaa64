"""A packed micro-batch in, what one context-parallel rank of it computes on out.

Positions are aligned with the logits here: the local token at position p predicts token p + 1, so every
per-token field of the local TrainBatch is the one of the token that is predicted.

    sequence of 5, cp = 2:   tokens   0 1 | 2 3 | 4 . | . .       rank 0 holds chunks 0 and 3, rank 1 chunks
    1 and 2
                             predicts 1 2   3 4   - .   . .       "." is padding, "-" has nothing to predict
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from mcore_rl.types import TrainBatch


@dataclass(frozen=True)
class RankBatch:
    """One micro-batch as rank (cp_rank, any tp) sees it; T local tokens with padding.

    tokens_T, positions_T   int64
    sequences_T             int64, number in the micro-batch of the sequence that the token is of
    padding_T               bool, True on padding; None where no rank has any
    sources_T               int64, index in the whole micro-batch of the token itself; -1 on padding
    targets_T               int64, likewise of the token predicted; -1 where there is none
    cu_seqlens_N1           int32, cumulative padded lengths of whole sequences (not of their local parts)
    num_tokens              real tokens on this rank; all of a filler's are padding
    batch                   the fields of the predicted tokens; loss_mask_T False and loss_weights_T 0
    without target
    routed_experts_TLK      int16, of the local tokens themselves, -1 where not known; None in a batch without
    """

    tokens_T: Tensor
    positions_T: Tensor
    sequences_T: Tensor
    padding_T: Tensor | None
    sources_T: Tensor
    targets_T: Tensor
    cu_seqlens_N1: Tensor
    max_len: int
    num_tokens: int
    batch: TrainBatch
    routed_experts_TLK: Tensor | None = None

    @property
    def labels_T(self) -> Tensor:
        return self.batch.token_ids_T

    def to(self, device: torch.device) -> "RankBatch":
        return replace(self, batch=_move(self.batch, device), **_moved_fields(self, device))


def padded_lens(lens_N: tuple[int, ...], cp_size: int, tp_size: int) -> tuple[int, ...]:
    """Lengths that cut into 2 * cp chunks each, with a total that splits over cp * tp ranks (the last one
    grows).
    """
    multiple = 2 * cp_size if cp_size > 1 else 1
    lens = [-(-n // multiple) * multiple for n in lens_N]
    lens[-1] += -sum(lens) % (multiple * tp_size)
    return tuple(lens)


def make_rank_batch(batch: TrainBatch, cp_rank: int, cp_size: int, tp_size: int) -> RankBatch:
    """Cut out and pad what context-parallel rank `cp_rank` of `cp_size` holds of the micro-batch."""
    padded_N = padded_lens(batch.lens_N, cp_size, tp_size)
    sequence_T, position_T = _local_tokens(padded_N, cp_rank, cp_size)
    lens_T = torch.tensor(batch.lens_N)[sequence_T]
    start_T = torch.tensor((0, *batch.lens_N)).cumsum(0)[sequence_T]
    real_T = position_T < lens_T
    source_T = start_T + torch.where(real_T, position_T, 0)
    if batch.is_filler:
        real_T = torch.zeros_like(real_T)
    targets_T = torch.where(position_T + 1 < lens_T, start_T + position_T + 1, -1)
    return RankBatch(
        tokens_T=batch.token_ids_T[source_T],
        positions_T=position_T,
        sequences_T=sequence_T,
        padding_T=None if padded_N == batch.lens_N and not batch.is_filler else ~real_T,
        sources_T=torch.where(real_T, source_T, -1),
        targets_T=targets_T,
        cu_seqlens_N1=torch.tensor((0, *padded_N)).cumsum(0).int(),
        max_len=max(padded_N),
        num_tokens=int(real_T.sum()),
        batch=_predicted(batch, targets_T, tuple(n // cp_size for n in padded_N)),
        routed_experts_TLK=_of_tokens(batch.routed_experts_TLK, source_T, real_T),
    )


def _of_tokens(experts_TLK: Tensor | None, source_T: Tensor, real_T: Tensor) -> Tensor | None:
    if experts_TLK is None:
        return None
    return torch.where(real_T[:, None, None], experts_TLK[source_T], -1)


def _local_tokens(padded_N: tuple[int, ...], cp_rank: int, cp_size: int) -> tuple[Tensor, Tensor]:
    """(sequence, position) of the rank's tokens, in the order in which Transformer Engine expects them."""
    lens_N = torch.tensor(padded_N)
    sequence_T = torch.repeat_interleave(torch.arange(len(padded_N)), lens_N)
    position_T = torch.arange(len(sequence_T)) - (lens_N.cumsum(0) - lens_N)[sequence_T]
    if cp_size == 1:
        return sequence_T, position_T
    chunk_T = position_T // (lens_N // (2 * cp_size))[sequence_T]
    mine_T = (chunk_T == cp_rank) | (chunk_T == 2 * cp_size - 1 - cp_rank)
    return sequence_T[mine_T], position_T[mine_T]


def _predicted(batch: TrainBatch, targets_T: Tensor, lens_N: tuple[int, ...]) -> TrainBatch:
    has_target_T = targets_T >= 0
    index_T = targets_T.clamp(min=0)
    values = {
        name: torch.where(has_target_T, value[index_T], torch.zeros((), dtype=value.dtype))
        for name, value in batch.token_fields().items()
        if value.dim() == 1
    }
    return TrainBatch(lens_N=lens_N, is_filler=batch.is_filler, **values)


def _moved_fields(item: RankBatch | TrainBatch, device: torch.device) -> dict[str, Tensor]:
    return {
        f.name: value.to(device, non_blocking=True)
        for f in fields(item)
        if isinstance(value := getattr(item, f.name), Tensor)
    }


def _move(batch: TrainBatch, device: torch.device) -> TrainBatch:
    return replace(batch, **_moved_fields(batch, device))
