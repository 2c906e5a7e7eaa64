"""Makes train batches of what sample stores hold, and brings computed fields back to the stores.

StoredBatch: sequences 3 0 1 2 of stores 0 1 0 1
  -> a request to each store:   store 0: 3 1     store 1: 0 2
  -> their tokens end to end:   3 3 3 1          0 0 2 2 2
  -> TrainBatch:                3 3 3 0 0 1 2 2 2
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from mcore_rl.types import Array, StoredBatch, StoredColumn, TrainBatch

ReadStores = Callable[[Mapping[int, ReadRequest]], Mapping[int, Mapping[str, Array]]]
"""Requests by store -> the columns by store and name."""
WriteStores = Callable[[Mapping[int, tuple[Array, Array, Mapping[str, Array]]]], None]
"""Takes (group_N, index_N, columns by name) by store."""
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


def assemble(batch: StoredBatch, read: ReadStores, layers: Sequence[int] = ()) -> TrainBatch:
    """Return the batch with its tokens.

    `layers`: the layers of routed experts that are wanted; empty: all.
    """
    values = _read_all(batch, read, tuple(layers))
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
    made = TrainBatch(values.pop("token_ids_T"), mask_T, batch.lens_N)
    if "routed_experts_TLK" in values:
        made = replace(made, expert_layers=tuple(layers))
    return replace(made, **values)


def assemble_parts(
    batch: StoredBatch, read: ReadStores, layers: Sequence[int] = ()
) -> list[TrainBatch]:
    """Return the micro-batches of `batch.parts` with their tokens; see `assemble`."""
    whole = assemble(batch, read, layers)
    firsts = accumulate(batch.parts, initial=0)
    indices = [range(first, first + num) for first, num in zip(firsts, batch.parts, strict=False)]
    made = iter(select_each(whole, [part for part in indices if part]))
    return [next(made) if num else make_filler(whole) for num in batch.parts]


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


def _read_all(batch: StoredBatch, read: ReadStores, layers: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the fields that have columns, in the order of the batch."""
    columns = columns_of(batch)
    sequences = _sequences_by_store(batch)
    names = tuple(columns.values())
    version = batch.version or 0
    requests = {
        store: ReadRequest(batch.group_N[here], batch.index_N[here], names, version, layers)
        for store, here in sequences.items()
    }
    answers = read(requests)
    rows = {store: tokens_of(batch.lens_N, here.tolist()) for store, here in sequences.items()}
    fields = {}
    for field, name in columns.items():
        parts = {store: torch.from_numpy(np.array(a[name])) for store, a in answers.items()}
        first = next(iter(parts.values()))
        dtype = WIDER.get(name, first.dtype)
        whole = torch.empty(sum(batch.lens_N), *first.shape[1:], dtype=dtype)
        for store, values in parts.items():
            whole[rows[store]] = values.to(dtype)
        if name == ROUTED_EXPERTS:
            # No engine has run the last token of a sequence.
            whole[torch.tensor(batch.lens_N).cumsum(0) - 1] = -1
        fields[field] = whole
    return fields
