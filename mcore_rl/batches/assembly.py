"""Makes train batches of what sample stores hold, and brings computed fields back to the stores.

StoredBatch: sequences 3 0 1 2 of stores 0 1 0 1
  -> a request to each store:   store 0: 3 1     store 1: 0 2
  -> their tokens end to end:   3 3 3 1          0 0 2 2 2
  -> TrainBatch:                3 3 3 0 0 1 2 2 2
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from mcore_rl.batches.batch import make_filler, select_each, tokens_of
from mcore_rl.batches.episodes import TOKEN_IDS
from mcore_rl.batches.kept_rows import CHOICES, INDEXER_TOPK, ROUTED_EXPERTS, STALE, ReadRequest
from mcore_rl.batches.sample_store import ROLLOUT_LOGPROBS
from mcore_rl.types import (
    Array,
    LogprobOptions,
    OwnChoices,
    StoredBatch,
    StoredColumn,
    TokenScores,
    TokenWork,
    TrainBatch,
)

T = TypeVar("T")

ReadStores = Callable[[Mapping[int, ReadRequest]], Mapping[int, Mapping[str, Array]]]
"""Requests by store -> the columns by store and name."""
WriteStores = Callable[[Mapping[int, tuple[Array, Array, Mapping[str, Array]]]], None]
"""Takes (group_N, index_N, columns by name) by store."""
OwnTokens = Callable[[tuple[int, ...]], Tensor]
"""Lengths of a micro-batch's sequences -> indices of the tokens that a rank routes, rising."""
BASE_COLUMNS = {"token_ids_T": TOKEN_IDS, "rollout_logprobs_T": ROLLOUT_LOGPROBS}
CHOSEN = {"routed_experts_TLK": "own_experts", "indexer_topk_TLK": "own_keys"}
"""Fields of choices of all tokens -> the fields of those that a rank computes with."""
WIDER = {TOKEN_IDS: torch.int64, ROUTED_EXPERTS: torch.int16, INDEXER_TOPK: torch.int32}
"""The dtypes of a TrainBatch for columns that stores keep in fewer bytes."""


def column_of(field: str) -> str:
    """Return the name of the column that keeps a field: old_logprobs for old_logprobs_T."""
    return field.rpartition("_")[0]


def columns_of(batch: StoredBatch) -> dict[str, str]:
    """Return the names of the columns that fill a batch's fields, by field."""
    stored = {name: value for name, value in vars(batch).items() if isinstance(value, StoredColumn)}
    return {
        **BASE_COLUMNS,
        **({} if batch.version is None else {"stale_T": STALE}),
        **{field: column.name for field, column in stored.items()},
    }


def all_tokens(lens_N: tuple[int, ...]) -> Tensor:
    """Return the indices of all tokens of a micro-batch; implements OwnTokens."""
    return torch.arange(sum(lens_N))


def assemble(batch: StoredBatch, read: ReadStores) -> TrainBatch:
    """Return the batch with its tokens."""
    return _make_batch(batch, _read_all(batch, read))


def assemble_parts(
    batch: StoredBatch,
    read: ReadStores,
    layers: Sequence[int] = (),
    own_tokens: OwnTokens = all_tokens,
    seen_tokens: OwnTokens = all_tokens,
) -> list[TrainBatch]:
    """Return the micro-batches of `batch.parts` with their tokens.

    Routed experts and chosen keys are read for `layers` (empty: all) and for the tokens that
    `own_tokens` names, and are in `own_experts` and `own_keys`. All else is read for the tokens
    that `seen_tokens` names; others have 0 and False.
    """
    seen, seen_G = _index_tokens(batch, seen_tokens)
    if sum(map(len, seen)) == sum(batch.lens_N):
        seen_G = None
    if batch.routed_experts_TLK is None and batch.indexer_topk_TLK is None:
        return _cut(_make_batch(batch, _read_all(batch, read, seen_G=seen_G)), batch.parts)
    own, own_G = _index_tokens(batch, own_tokens)
    values = _read_all(batch, read, tuple(layers), own_G, seen_G)
    lens = [len(tokens) for tokens in own]
    choices = {
        field: [
            OwnChoices(tokens, of_part, tuple(layers))
            for tokens, of_part in zip(own, values.pop(whole).split(lens), strict=True)
        ]
        for whole, field in CHOSEN.items()
        if whole in values
    }
    parts = _cut(_make_batch(batch, values), batch.parts)
    return [
        replace(part, **{field: of_parts[i] for field, of_parts in choices.items()})
        for i, part in enumerate(parts)
    ]


def apply_to_stored(
    function: TokenWork[T], batch: StoredBatch, read: ReadStores, write: WriteStores
) -> tuple[dict[str, StoredColumn], T]:
    """Call a function on a batch without choices of experts and keys; bring what it sets to stores.

    Returns the columns of the fields that it sets, and what it returns beside the batch.
    """
    whole = assemble(replace(batch, routed_experts_TLK=None, indexer_topk_TLK=None), read)
    made, returned = function(whole)
    changed = {
        name: value
        for name, value in made.token_fields().items()
        if value is not getattr(whole, name)
    }
    scatter(batch, {column_of(name): value for name, value in changed.items()}, write)
    return {name: StoredColumn(column_of(name)) for name in changed}, returned


def name_columns(
    scores: Sequence[TokenScores[Tensor]], options: LogprobOptions
) -> dict[str, list[Tensor]]:
    """Return the values of each micro-batch by the column that keeps them.

    Of a reference, only log-probs are kept: what its routers chose says nothing about the policy.
    """
    if options.reference:
        return {"ref_logprobs": [score.logprobs_T for score in scores]}
    columns = {
        "old_logprobs": [score.logprobs_T for score in scores],
        "router_flips": [score.router_flips_T for score in scores],
        "sum_squares": [score.sum_squares_T for score in scores],
        "routed_experts": [score.routed_experts_TLK for score in scores],
    }
    return {
        name: cast(list[Tensor], values)
        for name, values in columns.items()
        if values[0] is not None
    }


def refer_to_columns(columns: Collection[str]) -> TokenScores[StoredColumn]:
    """Return the scores as references to their columns."""

    def column(name: str) -> StoredColumn | None:
        return StoredColumn(name) if name in columns else None

    return TokenScores(
        StoredColumn("ref_logprobs" if "ref_logprobs" in columns else "old_logprobs"),
        router_flips_T=column("router_flips"),
        sum_squares_T=column("sum_squares"),
        routed_experts_TLK=column("routed_experts"),
    )


def _index_tokens(batch: StoredBatch, choose: OwnTokens) -> tuple[list[Tensor], Tensor]:
    """Return the tokens that are chosen, by index in each micro-batch and in the batch."""
    own = [choose(batch.lens_N[part]) for part in _slices(batch.parts)]
    starts = torch.tensor([0, *(sum(batch.lens_N[part]) for part in _slices(batch.parts))])
    return own, torch.cat([t + start for t, start in zip(own, starts.cumsum(0), strict=False)])


def _make_batch(batch: StoredBatch, values: dict[str, Tensor]) -> TrainBatch:
    """Return the batch with these fields, and those that are numbers per sample."""
    lens = torch.tensor(batch.lens_N)
    trained_N = torch.tensor(batch.is_trained_N)
    if batch.loss_mask_T is None:
        sampled_lens = torch.tensor(batch.sampled_lens_N)
        part_lens = torch.stack([lens - sampled_lens, sampled_lens], 1).flatten()
        mask_T = torch.stack([torch.zeros_like(trained_N), trained_N], 1).flatten()
        mask_T = mask_T.repeat_interleave(part_lens)
    else:
        mask_T = values.pop("loss_mask_T") & trained_N.repeat_interleave(lens)
    for field, values_N in (
        ("loss_weights_T", batch.loss_weights_N),
        ("advantages_T", batch.advantages_N),
    ):
        if values_N is not None:
            spread_T = torch.tensor(values_N).repeat_interleave(lens)
            values[field] = spread_T.masked_fill(~mask_T, 0.0)
    sample_N = None if batch.sample_N is None else tuple(batch.sample_N.tolist())
    made = TrainBatch(values.pop("token_ids_T"), mask_T, batch.lens_N, sample_N=sample_N)
    return replace(made, sums_from=batch.sums_from, **values)


def _slices(parts: Sequence[int]) -> list[slice]:
    """Return the sequences of each micro-batch; none of a filler."""
    ends = list(accumulate(parts))
    return [slice(end - num, end) for num, end in zip(parts, ends, strict=True)]


def _cut(whole: TrainBatch, parts: Sequence[int]) -> list[TrainBatch]:
    """Return the micro-batches of as many sequences as `parts` says; 0: a filler."""
    indices = [range(part.start, part.stop) for part in _slices(parts)]
    made = iter(select_each(whole, [part for part in indices if part]))
    return [next(made) if num else make_filler(whole) for num in parts]


def _ranges(lens_N: Sequence[int], index_G: Tensor) -> Array:
    """Return (sequence, first token, end) of each run of neighbors among tokens in rising order."""
    ends_N = torch.tensor(lens_N).cumsum(0)
    sequence_G = torch.searchsorted(ends_N, index_G, right=True)
    position_G = index_G - (ends_N - torch.tensor(lens_N))[sequence_G]
    begins_G = torch.ones(len(index_G), dtype=torch.bool)
    begins_G[1:] = (sequence_G.diff() != 0) | (position_G.diff() != 1)
    ends_G = begins_G.roll(-1)
    parts = (sequence_G[begins_G], position_G[begins_G], position_G[ends_G] + 1)
    return torch.stack(parts, 1).numpy()


def scatter(batch: StoredBatch, columns: Mapping[str, Tensor], write: WriteStores) -> None:
    """Bring the values of a batch's tokens, by column, to the stores of its samples."""
    parts = {}
    for store, here in _sequences_by_store(batch).items():
        rows = tokens_of(batch.lens_N, here.tolist())
        own = {name: values[rows].numpy() for name, values in columns.items()}
        parts[store] = (batch.group_N[here], batch.index_N[here], own)
    write(parts)


def scatter_parts(
    batch: StoredBatch, columns: Mapping[str, Sequence[Tensor]], write: WriteStores
) -> None:
    """Do as `scatter` with a tensor per micro-batch; those of fillers are left out."""
    kept = [i for i, num in enumerate(batch.parts) if num]
    if kept:
        whole = {name: torch.cat([values[i] for i in kept]) for name, values in columns.items()}
        scatter(batch, whole, write)


def _sequences_by_store(batch: StoredBatch) -> dict[int, Array]:
    """Return the indices of the sequences that lie in each store."""
    stores = np.unique(batch.store_N).tolist()
    return {store: np.flatnonzero(batch.store_N == store) for store in stores}


def _read_all(
    batch: StoredBatch,
    read: ReadStores,
    layers: tuple[int, ...] = (),
    own_G: Tensor | None = None,
    seen_G: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the fields that have columns, in the order of the batch.

    Routed experts and chosen keys are those of `layers` (empty: all) and of the tokens `own_G`, all
    else is that of the tokens `seen_G`, both rising (None: all).
    """
    columns = columns_of(batch)
    own, seen = _Picked(batch.lens_N, own_G), _Picked(batch.lens_N, seen_G)
    requests, rows, rows_of_experts = {}, {}, {}
    for store, here in _sequences_by_store(batch).items():
        experts_R3, rows_of_experts[store] = own.select_sequences(here)
        tokens_R3, picked = seen.select_sequences(here)
        rows[store] = picked if seen_G is None else seen_G[picked]
        requests[store] = ReadRequest(
            group_N=batch.group_N[here],
            index_N=batch.index_N[here],
            names=tuple(columns.values()),
            version=batch.version or 0,
            layers=layers,
            experts_R3=experts_R3,
            tokens_R3=tokens_R3,
        )
    answers = read(requests)
    num_tokens = sum(batch.lens_N)
    fields = {}
    for field, name in columns.items():
        is_choice = name in CHOICES
        fields[field] = _in_order(
            {store: answer[name] for store, answer in answers.items()},
            rows_of_experts if is_choice else rows,
            num_tokens if own_G is None or not is_choice else len(own_G),
            WIDER.get(name),
        )
    if chosen := CHOSEN.keys() & fields.keys():
        # No engine has run the last token of a sequence.
        last_N = torch.tensor(batch.lens_N).cumsum(0) - 1
        unknown = last_N if own_G is None else torch.isin(own_G, last_N)
        for name in chosen:
            fields[name][unknown] = -1
    return fields


class _Picked:
    """Tokens of a batch, as ranges of its sequences."""

    def __init__(self, lens_N: Sequence[int], index_G: Tensor | None) -> None:
        """`index_G` are the tokens, rising; None: all."""
        self._lens_N = lens_N
        self._ranges_R3 = None if index_G is None else _ranges(lens_N, index_G)

    def select_sequences(self, here: Array) -> tuple[Array | None, Tensor]:
        """Return the ranges of the sequences `here`, counted among those, and which tokens of the
        picked ones they are.
        """
        if self._ranges_R3 is None:
            return None, tokens_of(self._lens_N, here.tolist())
        return _select_sequences(self._ranges_R3, here)


def _select_sequences(ranges_R3: Array, here: Array) -> tuple[Array, Tensor]:
    """Return the ranges of the sequences `here`, counted among those, and where their rows go."""
    is_here_R = np.isin(ranges_R3[:, 0], here)
    own_R3 = ranges_R3[is_here_R]
    own_R3[:, 0] = np.searchsorted(here, own_R3[:, 0])
    lens_R = (ranges_R3[:, 2] - ranges_R3[:, 1]).tolist()
    return own_R3, tokens_of(lens_R, np.flatnonzero(is_here_R).tolist())


def _in_order(
    answers: Mapping[int, Array],
    rows: Mapping[int, Tensor],
    num_rows: int,
    dtype: torch.dtype | None,
) -> Tensor:
    """Return the values of all stores, each at its rows, 0 at others; `dtype` None: as kept."""
    parts = {store: torch.from_numpy(np.array(values)) for store, values in answers.items()}
    first = next(iter(parts.values()))
    whole = torch.zeros(num_rows, *first.shape[1:], dtype=dtype or first.dtype)
    for store, values in parts.items():
        whole[rows[store]] = values.to(whole.dtype)
    return whole
