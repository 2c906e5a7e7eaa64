"""Makes train batches of what sample stores hold, and brings computed fields back to the stores.

StoredBatch: sequences 3 0 1 2 of stores 0 1 0 1
  -> a request to each store:   store 0: 3 1     store 1: 0 2
  -> their tokens end to end:   3 3 3 1          0 0 2 2 2
  -> TrainBatch:                3 3 3 0 0 1 2 2 2
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from mcore_rl.data.batch import make_filler, select_each, tokens_of
from mcore_rl.data.sample_store import (
    ROLLOUT_LOGPROBS,
    ROUTED_EXPERTS,
    STALE,
    TOKEN_IDS,
    ReadRequest,
)
from mcore_rl.types import Array, OwnExperts, StoredBatch, StoredColumn, TrainBatch

ReadStores = Callable[[Mapping[int, ReadRequest]], Mapping[int, Mapping[str, Array]]]
"""Requests by store -> the columns by store and name."""
WriteStores = Callable[[Mapping[int, tuple[Array, Array, Mapping[str, Array]]]], None]
"""Takes (group_N, index_N, columns by name) by store."""
OwnTokens = Callable[[tuple[int, ...]], Tensor]
"""Lengths of a micro-batch's sequences -> indices of the tokens that a rank routes, rising."""
BASE_COLUMNS = {"token_ids_T": TOKEN_IDS, "rollout_logprobs_T": ROLLOUT_LOGPROBS}
WIDER = {TOKEN_IDS: torch.int64, ROUTED_EXPERTS: torch.int16}
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


def assemble(batch: StoredBatch, read: ReadStores) -> TrainBatch:
    """Return the batch with its tokens."""
    return _made(batch, _read_all(batch, read))


def assemble_parts(
    batch: StoredBatch,
    read: ReadStores,
    layers: Sequence[int] = (),
    own_tokens: OwnTokens | None = None,
) -> list[TrainBatch]:
    """Return the micro-batches of `batch.parts` with their tokens.

    Routed experts are read for `layers` (empty: all) and for the tokens that `own_tokens` names
    (None: all), and are in `own_experts`.
    """
    lens = _lens_of_parts(batch)
    if batch.routed_experts_TLK is None:
        return _cut(_made(batch, _read_all(batch, read)), batch.parts)
    own = [_all_tokens(lens_N) if own_tokens is None else own_tokens(lens_N) for lens_N in lens]
    starts = torch.tensor([0, *(sum(lens_N) for lens_N in lens)]).cumsum(0)
    index_G = torch.cat([tokens + starts[k] for k, tokens in enumerate(own)])
    values = _read_all(batch, read, ExpertRequest(tuple(layers), _ranges(batch.lens_N, index_G)))
    experts_GLK = values.pop("routed_experts_TLK")
    is_last_G = torch.isin(index_G, torch.tensor(batch.lens_N).cumsum(0) - 1)
    experts_GLK[is_last_G] = -1  # no engine has run the last token of a sequence
    of_parts = experts_GLK.split([len(tokens) for tokens in own])
    named = [
        OwnExperts(tokens, experts, tuple(layers))
        for tokens, experts in zip(own, of_parts, strict=True)
    ]
    made = _cut(_made(batch, values), batch.parts)
    return [replace(part, own_experts=own) for part, own in zip(made, named, strict=True)]


def _made(batch: StoredBatch, values: dict[str, Tensor]) -> TrainBatch:
    """Return the batch with these fields, and those that are numbers per sample."""
    lens = torch.tensor(batch.lens_N)
    prompt_lens = torch.from_numpy(batch.prompt_lens_N)
    part_lens = torch.stack([prompt_lens, lens - prompt_lens], 1).flatten()
    trained_N = torch.from_numpy(batch.is_trained_N)
    mask_T = torch.stack([torch.zeros_like(trained_N), trained_N], 1).flatten()
    mask_T = mask_T.repeat_interleave(part_lens)
    for field, values_N in (
        ("loss_weights_T", batch.loss_weights_N),
        ("advantages_T", batch.advantages_N),
    ):
        if values_N is not None:
            spread_T = torch.from_numpy(values_N).repeat_interleave(lens)
            values[field] = spread_T.masked_fill(~mask_T, 0.0)
    return replace(TrainBatch(values.pop("token_ids_T"), mask_T, batch.lens_N), **values)


def _lens_of_parts(batch: StoredBatch) -> list[tuple[int, ...]]:
    """Return the lengths of each micro-batch's sequences; none of a filler."""
    firsts = accumulate(batch.parts, initial=0)
    return [
        batch.lens_N[first : first + num] for first, num in zip(firsts, batch.parts, strict=False)
    ]


def _all_tokens(lens_N: Sequence[int]) -> Tensor:
    return torch.arange(sum(lens_N))


def _cut(whole: TrainBatch, parts: Sequence[int]) -> list[TrainBatch]:
    """Return the micro-batches of as many sequences as `parts` says; 0: a filler."""
    firsts = accumulate(parts, initial=0)
    indices = [range(first, first + num) for first, num in zip(firsts, parts, strict=False)]
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


@dataclass(frozen=True)
class ExpertRequest:
    """The layers and ranges of tokens, as (sequence, first token, end), whose experts are read."""

    layers: tuple[int, ...]
    ranges_R3: Array


def _read_all(
    batch: StoredBatch, read: ReadStores, experts: ExpertRequest | None = None
) -> dict[str, Tensor]:
    """Return the fields that have columns, in the order of the batch.

    Experts are in the order of the ranges in `experts`; None: those of all tokens and layers.
    """
    columns = columns_of(batch)
    sequences = _sequences_by_store(batch)
    requests = {
        store: ReadRequest(
            batch.group_N[here], batch.index_N[here], tuple(columns.values()), batch.version or 0
        )
        for store, here in sequences.items()
    }
    rows = {store: tokens_of(batch.lens_N, here.tolist()) for store, here in sequences.items()}
    rows_of_experts = rows
    if experts is not None:
        asked = {store: _asked(experts, here) for store, here in sequences.items()}
        rows_of_experts = {store: rows for store, (_, rows) in asked.items()}
        requests = {
            store: replace(request, layers=experts.layers, ranges_R3=asked[store][0])
            for store, request in requests.items()
        }
    answers = read(requests)
    fields = {
        field: _in_order(
            {store: answer[name] for store, answer in answers.items()},
            rows_of_experts if name == ROUTED_EXPERTS else rows,
            WIDER.get(name),
        )
        for field, name in columns.items()
    }
    if experts is None and "routed_experts_TLK" in fields:
        # No engine has run the last token of a sequence.
        fields["routed_experts_TLK"][torch.tensor(batch.lens_N).cumsum(0) - 1] = -1
    return fields


def _asked(experts: ExpertRequest, here: Array) -> tuple[Array, Tensor]:
    """Return the ranges of the sequences `here`, counted among those, and where their rows go."""
    ranges_R3 = experts.ranges_R3
    is_here_R = np.isin(ranges_R3[:, 0], here)
    own_R3 = ranges_R3[is_here_R]
    own_R3[:, 0] = np.searchsorted(here, own_R3[:, 0])
    lens_R = (ranges_R3[:, 2] - ranges_R3[:, 1]).tolist()
    return own_R3, tokens_of(lens_R, np.flatnonzero(is_here_R).tolist())


def _in_order(
    answers: Mapping[int, Array], rows: Mapping[int, Tensor], dtype: torch.dtype | None
) -> Tensor:
    """Return the values of all stores, each at its rows; `dtype` None: as they are kept."""
    parts = {store: torch.from_numpy(np.array(values)) for store, values in answers.items()}
    first = next(iter(parts.values()))
    num_rows = sum(len(of_store) for of_store in rows.values())
    whole = torch.empty(num_rows, *first.shape[1:], dtype=dtype or first.dtype)
    for store, values in parts.items():
        whole[rows[store]] = values.to(whole.dtype)
    return whole
