"""The columns of a sequence as a store keeps them, and how they are laid out for readers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from mcore_rl.batches.episodes import ROLLOUT_LOGPROBS, TOKEN_IDS
from mcore_rl.types import Array, Prompt, PromptImage, Sample, VersionSpan, WeightVersion

ROUTED_EXPERTS = "routed_experts"
INDEXER_TOPK = "indexer_topk"
CHOICES = (ROUTED_EXPERTS, INDEXER_TOPK)
"""Columns [tokens, layers, choices] that lack a sequence's last token, which no engine has run."""
TEACHER_LOGPROBS = "teacher_logprobs"
LOGPROBS = (ROLLOUT_LOGPROBS, "old_logprobs", "ref_logprobs", TEACHER_LOGPROBS)
FLOAT32 = "float32"
BFLOAT16 = "bfloat16"
STALE = "stale"
"""Not kept: computed from a sample's version spans when it is read."""


@dataclass
class KeptRow:
    """A sequence as arrays, token-aligned; routed experts and chosen keys lack the last token, and
    the latter the tokens that see no more keys than are chosen, too.

    versions   the weights that sampled its tokens, in positions of the sequence
    images     those that its tokens show, in order
    """

    versions: tuple[VersionSpan, ...]
    columns: dict[str, Array] = field(default_factory=dict)
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True)
class ReadRequest:
    """Asks for columns of samples, each laid end to end in the order of group_N and index_N.

    version      weights that are trained, for the column `stale`
    layers       the layers whose choices are read; empty: all
    experts_R3   int64 (place in group_N, first token, end), the tokens whose choices of experts and
                 keys are read, laid end to end in this order; None: those of all tokens
    tokens_R3    the same of all other columns
    """

    group_N: Array
    index_N: Array
    names: tuple[str, ...]
    version: int = 0
    layers: tuple[int, ...] = ()
    experts_R3: Array | None = None
    tokens_R3: Array | None = None


def lay_out(name: str, samples: Sequence[KeptRow], request: ReadRequest) -> Array:
    """Return a column of rows, laid end to end. Raises KeyError for an unknown one."""
    if name in CHOICES:
        return _lay_out_choices(name, samples, request)
    if name == STALE:
        columns = [_stale(sample, request.version) for sample in samples]
    else:
        columns = [column_of(sample, name) for sample in samples]
    if request.tokens_R3 is None:
        return np.concatenate(columns)
    parts = [columns[k][first:stop] for k, first, stop in request.tokens_R3.tolist()]
    return np.concatenate(parts or [columns[0][:0]])


def column_of(row: KeptRow, name: str) -> Array:
    """Return a column of a row; log-probs as float32."""
    values = row.columns[name]
    if name in LOGPROBS and values.dtype == np.uint16:
        return torch.from_numpy(np.asarray(values)).view(torch.bfloat16).float().numpy()
    return values


def drop_implied(positions_TLK: Array) -> Array:
    """Return the chosen keys without the tokens that see no more than K keys: they chose all."""
    return positions_TLK[positions_TLK.shape[2] :].copy()


def restore_implied(kept: Array, first: int, stop: int) -> Array:
    """Return the chosen keys of tokens first to stop of a sequence, of those `drop_implied` left.

    The last token of the sequence may be missing, as it was never run.
    """
    num_layers, num_chosen = kept.shape[1:]
    position_T1 = np.arange(first, min(stop, num_chosen))[:, None]
    key_K = np.arange(num_chosen)
    implied_TK = np.where(key_K <= position_T1, key_K, -1).astype(kept.dtype)
    implied = np.broadcast_to(implied_TK[:, None], (len(implied_TK), num_layers, num_chosen))
    own = slice(max(first - num_chosen, 0), max(stop - num_chosen, 0))
    return np.concatenate([implied, kept[own]])


def _lay_out_choices(name: str, samples: Sequence[KeptRow], request: ReadRequest) -> Array:
    """Return the experts or chosen keys of the request's tokens and layers.

    No engine has run a sample's last token: its choices say nothing, and readers mark them so.
    """
    if request.experts_R3 is None:
        ranges = [(k, 0, len(sample.columns[TOKEN_IDS])) for k, sample in enumerate(samples)]
    else:
        ranges = request.experts_R3.tolist()
    kept = [sample.columns[name] for sample in samples]
    num_layers, topk = kept[0].shape[1:]
    layers = list(request.layers) or slice(None)
    shape = (
        sum(stop - first for _, first, stop in ranges),
        len(request.layers) or num_layers,
        topk,
    )
    laid_out = np.zeros(shape, np.result_type(*{array.dtype for array in kept}))
    at = 0
    for k, first, stop in ranges:
        if name == INDEXER_TOPK:
            part = restore_implied(kept[k][:, layers], first, stop)
        else:
            part = kept[k][first:stop, layers]
        laid_out[at : at + len(part)] = part
        at += stop - first
    return laid_out


def _stale(row: KeptRow, version: int) -> Array:
    stale = np.zeros(len(row.columns[TOKEN_IDS]), np.bool_)
    for span in row.versions:
        stale[span.start : span.stop] = span.version != version
    return stale


def as_response(prompt: Prompt, row: int, token_ids: Sequence[int], start: int) -> Sample:
    """Return a row as a response that begins at token `start`, which a teacher scores."""
    response_ids = tuple(token_ids[start:])
    return Sample(
        prompt=replace(prompt, token_ids=tuple(token_ids[:start])),
        sample_index=row,
        response_ids=response_ids,
        logprobs=(0.0,) * len(response_ids),
        finish_reason="",
        versions=(VersionSpan(0, len(response_ids), WeightVersion(0)),),
        text="",
    )
