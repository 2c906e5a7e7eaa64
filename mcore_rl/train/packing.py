"""Cuts out of a packed micro-batch the part that one context-parallel (CP) rank computes on.

Each sequence is padded and cut into 2 * cp chunks. CP rank r holds chunks r and 2 * cp - 1 - r, so
that every rank has the same causal attention work. One sequence of 5 tokens with cp = 2:

    chunk       0     1     2     3
    token     0 1 | 2 3 | 4 . | . .      "." is padding
    target    1 2 | 3 4 | - . | . .      "-" is the last token, which predicts nothing
    CP rank   0     1     1     0

The loss needs the fields of the token that is predicted, since logits at position p score token
p + 1. RankBatch.batch therefore holds every per-token field shifted: entry t is that of the target.

Without context parallelism, beginnings that sequences share can be computed once. A sequence then
attends to the keys of the tokens that it takes over, and to its own:

    micro-batch   s a b c d e | s a b f g h         indices 0 to 11
    computed      s a b c d e | b f g h             positions 0 to 5, and 2 to 5
    keys          s a b c d e | s a b f g h         of the local tokens 0 to 5, and 0 1 6 7 8 9

Entry t of `twins_T` is the token that is computed in place of token t: 0 1 2 for s a b of sequence
1, whose log-probs and values are those of sequence 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_rl.batches.shared_prefixes import Sharing, find_batch_sharing
from mcore_rl.data.images.places import ImageTokens
from mcore_rl.device import on_device
from mcore_rl.train.vision.rank_images import RankImages, make_rank_images
from mcore_rl.types import OwnChoices, TrainBatch

if TYPE_CHECKING:
    from mcore_rl.train.mtp.ahead import DraftTargets
    from mcore_rl.train.sparse.choices import ChunkKeys


@dataclass(frozen=True)
class SharedRows:
    """Which keys the computed tokens of a micro-batch attend to.

    keys_K       int64, the local tokens whose keys each sequence sees, end to end
    cu_keys_N1   int32, cumulative numbers of keys
    max_keys     most keys of a sequence
    twins_T      int64, index in the micro-batch of the token that is computed for each token; on
                 the host
    """

    keys_K: Tensor
    cu_keys_N1: Tensor
    max_keys: int
    twins_T: Tensor

    def on_device(self) -> "SharedRows":
        keys_K, cu_keys_N1 = on_device(self.keys_K), on_device(self.cu_keys_N1)
        return replace(self, keys_K=keys_K, cu_keys_N1=cu_keys_N1)


def lay_out_shared(lens_N: Sequence[int], padded_N: Sequence[int], sharing: Sharing) -> SharedRows:
    """Return the layout of sequences with `lens_N` tokens; `padded_N` of each are computed.

    The computed tokens lie end to end, with padding behind a sequence.
    """
    first_N = torch.tensor((0, *padded_N)).cumsum(0)
    source_N = torch.tensor((0, *lens_N)).cumsum(0)
    keys: dict[int, Tensor] = {}
    twins: dict[int, Tensor] = {}
    for n in sharing.order:
        start, parent = sharing.starts[n], sharing.parents[n]
        own_keys = torch.arange(padded_N[n]) + first_N[n]
        own_tokens = torch.arange(lens_N[n]) + source_N[n]
        if parent < 0:
            keys[n], twins[n] = own_keys, own_tokens
            continue
        keys[n] = torch.cat([keys[parent][:start], own_keys])
        # The parent predicts the token at `start` as well, with the same log-prob.
        twins[n] = torch.cat([twins[parent][: start + 1], own_tokens[start + 1 :]])
    in_order = range(len(lens_N))
    nums_keys = [len(keys[n]) for n in in_order]
    return SharedRows(
        keys_K=torch.cat([keys[n] for n in in_order]),
        cu_keys_N1=torch.tensor((0, *nums_keys)).cumsum(0).int(),
        max_keys=max(nums_keys),
        twins_T=torch.cat([twins[n] for n in in_order]),
    )


@dataclass(frozen=True)
class RankBatch:
    """The part of one micro-batch on a context-parallel rank; T local tokens, padding included.

    It is made in host memory. `on_device` returns what one stage of the model computes with.

    tokens_T             int64, token ids
    positions_T          int64, position in the sequence
    sequences_T          int64, index of the token's sequence in the micro-batch
    padding_T            bool, True on padding; None if no rank has any
    sources_T            int64, index of the token in the whole micro-batch; -1 on padding
    targets_T            int64, index of the predicted token in the whole micro-batch; -1 for none
    cu_seqlens_N1        int32, cumulative padded lengths of whole sequences, not of local parts
    max_len              longest padded length of a whole sequence
    num_tokens           real tokens on this rank, with those that are not computed because others
                         stand for them; all tokens of a filler count as padding
    batch                the fields of the predicted tokens; loss_mask_T is False and loss_weights_T
                         0 where there is none
    named                the experts that the micro-batch names for its tokens, in host memory; None
                         if it names none. See `experts`
    named_keys           the same of the keys that indexers chose. See `keys`
    chunk_keys           what layers with sparse attention read of them; on the device alone
    vision               images and rotary positions; None for a model that sees text alone
    shared               what sequences with a common beginning attend to; None: each has its own
    scored_R             int64, rising, the local tokens that get logits; None: all of them
    drafts               what layers for multi-token prediction learn; None: they are not run
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
    named: OwnChoices | None = None
    named_keys: OwnChoices | None = None
    chunk_keys: "ChunkKeys | None" = None
    vision: RankImages | None = None
    shared: SharedRows | None = None
    scored_R: Tensor | None = None
    drafts: "DraftTargets | None" = None

    @property
    def twins_T(self) -> Tensor | None:
        """SharedRows.twins_T; None if each token is computed."""
        return None if self.shared is None else self.shared.twins_T

    @property
    def has_images(self) -> bool:
        """Return whether a tower runs on the micro-batch, on whatever rank."""
        return self.vision is not None and self.vision.images is not None

    @property
    def labels_T(self) -> Tensor:
        """Ids of the predicted tokens; 0 where there is none."""
        return self.batch.token_ids_T

    def experts(self, rows: slice, layers: slice) -> Tensor | None:
        """Return the experts named for these local tokens in these layers, int16, in host memory.

        They are -1 where not known and on padding; None if the micro-batch names none. All of
        `layers` and of the local tokens must be among those that it names experts of.
        """
        if self.named is None:
            return None
        named_MLK = self.named.choices_MLK
        if self.named.layers:
            places = [self.named.layers.index(k) for k in range(layers.start, layers.stop)]
            named_MLK = named_MLK[:, places]
        else:
            named_MLK = named_MLK[:, layers]
        return _pick_rows(self.sources_T[rows], self.named.tokens_M, named_MLK)

    def keys(self, layer: int) -> Tensor:
        """Return the keys named for the local tokens in a layer, int32 [T, K], in host memory.

        They are positions among the packed tokens of all context-parallel ranks; -1 for none.
        `named_keys` must have the layer and all local tokens. For a batch in host memory.
        """
        named = self.named_keys
        assert named is not None, "the micro-batch names no keys"
        place = named.layers.index(layer) if named.layers else layer
        keys_TK = _pick_rows(self.sources_T, named.tokens_M, named.choices_MLK[:, place])
        start_T = self.cu_seqlens_N1[self.sequences_T]
        return torch.where(keys_TK >= 0, keys_TK + start_T[:, None], -1)

    def on_device(self, *, targets: bool, images: bool = False) -> "RankBatch":
        """Return a copy of what the model reads, and with `targets` of what the loss reads.

        `images`: the first stage reads them. The copies are asynchronous. sources_T, targets_T and
        `named` stay on the host.
        """
        read = ("tokens_T", "positions_T", "sequences_T", "padding_T", "cu_seqlens_N1", "scored_R")
        moved: dict[str, Any] = {name: _move(getattr(self, name)) for name in read}
        if self.vision is not None:
            moved["vision"] = self.vision.on_device(images=images)
        if self.shared is not None:
            moved["shared"] = self.shared.on_device()
        if self.drafts is not None:
            moved["drafts"] = self.drafts.on_device() if targets else None
        return replace(self, batch=fields_on_device(self.batch) if targets else self.batch, **moved)


def pad_lens(lens_N: tuple[int, ...], cp_size: int, tp_size: int, rows: int = 1) -> tuple[int, ...]:
    """Return lengths that split into 2 * cp_size chunks each, and whose sum splits over all ranks.

    Each length is rounded up; the last one also grows until every tensor-parallel rank gets the
    same number of tokens, a multiple of `rows`.
    """
    multiple = 2 * cp_size if cp_size > 1 else 1
    lens = [math.ceil(num_tokens / multiple) * multiple for num_tokens in lens_N]
    missing = -sum(lens) % math.lcm(multiple * tp_size, rows * cp_size * tp_size)
    lens[-1] += missing
    return tuple(lens)


def make_rank_batch(
    batch: TrainBatch,
    cp_rank: int,
    cp_size: int,
    tp_size: int,
    rows: int = 1,
    image_tokens: ImageTokens | None = None,
    *,
    share: bool = False,
) -> RankBatch:
    """Return the padded part of the micro-batch on context-parallel rank `cp_rank` of `cp_size`.

    Each of its tensor-parallel ranks gets a multiple of `rows` tokens. `image_tokens`: of a model
    that sees images. `share`: beginnings that sequences have in common are computed once, without
    context parallelism. Raises ValueError if the micro-batch has images and the model sees none, or
    if an image has fewer placeholders than it takes.
    """
    if image_tokens is None and batch.images is not None:
        raise ValueError(
            f"a micro-batch has {len(batch.images.grids_I3)} images, but the model sees only text:"
            " train a vision-language model, or leave the images out of the data"
        )
    sharing = _find_sharing(batch) if share and cp_size == 1 else None
    starts_N = sharing.starts if sharing else (0,) * len(batch.lens_N)
    computed_N = tuple(n - start for n, start in zip(batch.lens_N, starts_N, strict=True))
    padded_N = pad_lens(computed_N, cp_size, tp_size, rows)
    sequence_T, position_T = _local_tokens(padded_N, cp_rank, cp_size)
    position_T = position_T + torch.tensor(starts_N)[sequence_T]
    first_T = torch.tensor((0, *batch.lens_N)).cumsum(0)[sequence_T]
    source_T = _indices(batch.lens_N, sequence_T, position_T)
    targets_T = _indices(batch.lens_N, sequence_T, position_T + 1)
    real_T = (source_T >= 0) & (not batch.is_filler)
    own_T = torch.where(real_T, source_T, -1)
    vision = image_tokens and make_rank_images(batch, padded_N, own_T, image_tokens)
    return RankBatch(
        tokens_T=batch.token_ids_T[torch.where(source_T >= 0, source_T, first_T)],
        positions_T=position_T,
        sequences_T=sequence_T,
        padding_T=None if padded_N == computed_N and not batch.is_filler else ~real_T,
        sources_T=own_T,
        targets_T=targets_T,
        cu_seqlens_N1=torch.tensor((0, *padded_N)).cumsum(0).int(),
        max_len=max(padded_N),
        num_tokens=0 if batch.is_filler else int(real_T.sum()) + sum(starts_N),
        batch=_fields_of_targets(batch, targets_T, tuple(n // cp_size for n in padded_N)),
        named=_get_named(batch, batch.routed_experts_TLK, batch.own_experts),
        named_keys=_get_named(batch, batch.indexer_topk_TLK, batch.own_keys),
        vision=vision,
        shared=lay_out_shared(batch.lens_N, padded_N, sharing) if sharing else None,
    )


def _find_sharing(batch: TrainBatch) -> Sharing | None:
    found = find_batch_sharing(batch)
    return found if any(found.starts) else None


def local_sources(
    lens_N: tuple[int, ...], cp_rank: int, cp_size: int, tp_size: int, rows: int = 1
) -> Tensor:
    """Return RankBatch.sources_T of the micro-batch of these lengths; see `make_rank_batch`."""
    padded_N = pad_lens(lens_N, cp_size, tp_size, rows)
    return _indices(lens_N, *_local_tokens(padded_N, cp_rank, cp_size))


def local_tokens(
    lens_N: tuple[int, ...],
    cp_rank: int,
    cp_size: int,
    tp_size: int,
    rows: int = 1,
    *,
    ahead: int = 1,
) -> Tensor:
    """Return the tokens that `make_rank_batch` reads, computed or predicted ones, rising.

    ahead   how far from a computed token predicted ones are, at most
    """
    padded_N = pad_lens(lens_N, cp_size, tp_size, rows)
    sequence_T, position_T = _local_tokens(padded_N, cp_rank, cp_size)
    reached = [_indices(lens_N, sequence_T, position_T + k) for k in range(ahead + 1)]
    read_T = torch.cat(reached).unique()
    return read_T[read_T >= 0]


def find_ahead(lens_N: tuple[int, ...], own: RankBatch, distance: int) -> Tensor:
    """Return the token that is `distance` behind each local one, -1 beyond a sequence.

    It is an index in the micro-batch, whose sequences have `lens_N` tokens.
    """
    return _indices(lens_N, own.sequences_T, own.positions_T + distance)


def _indices(lens_N: tuple[int, ...], sequence_T: Tensor, position_T: Tensor) -> Tensor:
    """Return the index in the micro-batch of each (sequence, position); -1 beyond a sequence."""
    start_T = torch.tensor((0, *lens_N)).cumsum(0)[sequence_T]
    return torch.where(position_T < torch.tensor(lens_N)[sequence_T], start_T + position_T, -1)


def _get_named(
    batch: TrainBatch, choices_TLK: Tensor | None, own: OwnChoices | None
) -> OwnChoices | None:
    """Return what a batch names for its tokens: for all of them, or for some."""
    if choices_TLK is not None:
        return OwnChoices(torch.arange(len(batch.token_ids_T)), choices_TLK)
    return own


def _pick_rows(wanted_T: Tensor, tokens_M: Tensor, named_M: Tensor) -> Tensor:
    """Return the rows of `named_M`, which are of the tokens `tokens_M`; -1 where wanted is -1."""
    is_real_T = wanted_T >= 0
    picked_T = torch.full((len(wanted_T), *named_M.shape[1:]), -1, dtype=named_M.dtype)
    real_T = wanted_T[is_real_T]
    row_T = torch.searchsorted(tokens_M, real_T)
    assert torch.equal(tokens_M[row_T], real_T), "experts or keys of other tokens"
    picked_T[is_real_T] = named_M[row_T]
    return picked_T


def _local_tokens(padded_N: tuple[int, ...], cp_rank: int, cp_size: int) -> tuple[Tensor, Tensor]:
    """Return (sequence, position) of the rank's tokens in the order Transformer Engine expects."""
    lens_N = torch.tensor(padded_N)
    sequence_T = torch.repeat_interleave(torch.arange(len(padded_N)), lens_N)
    position_T = torch.arange(len(sequence_T)) - (lens_N.cumsum(0) - lens_N)[sequence_T]
    if cp_size == 1:
        return sequence_T, position_T
    chunk_T = position_T // (lens_N // (2 * cp_size))[sequence_T]
    mine_T = (chunk_T == cp_rank) | (chunk_T == 2 * cp_size - 1 - cp_rank)
    return sequence_T[mine_T], position_T[mine_T]


def _fields_of_targets(batch: TrainBatch, targets_T: Tensor, lens_N: tuple[int, ...]) -> TrainBatch:
    """Return the batch's per-token fields at `targets_T`; 0 or False where there is no target."""
    has_target_T = targets_T >= 0
    index_T = targets_T.clamp(min=0)
    values: dict[str, Any] = {
        name: torch.where(has_target_T, value[index_T], torch.zeros((), dtype=value.dtype))
        for name, value in batch.token_fields().items()
        if value.dim() == 1
    }
    return TrainBatch(
        lens_N=lens_N,
        sample_N=batch.sample_N,
        sums_from=batch.sums_from,
        is_filler=batch.is_filler,
        **values,
    )


def fields_on_device(batch: TrainBatch) -> TrainBatch:
    """Return the batch with its per-token fields on the device; the copies are asynchronous."""
    return replace(batch, **{name: on_device(v) for name, v in batch.token_fields().items()})


def _move(value: Tensor | None) -> Tensor | None:
    return None if value is None else on_device(value)
