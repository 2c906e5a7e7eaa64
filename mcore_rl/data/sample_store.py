"""Keeps the samples of one node near its engines, as arrays, until nobody refers to them.

A group is the samples of one prompt. A column has a value for each token of a sample, prompt and
response, and is None where it was never written:

    token_ids  rollout_logprobs  routed_experts      written when a group is sampled
    teacher_logprobs  old_logprobs  values  ...      written by those who compute them

Where memory is bounded, what is sampled beyond the bound goes to files, and is read from there.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mcore_rl.data.spill import SpillFiles
from mcore_rl.types import Array, Prompt, Sample, VersionSpan

_log = logging.getLogger(__name__)
TOKEN_IDS = "token_ids"
ROLLOUT_LOGPROBS = "rollout_logprobs"
ROUTED_EXPERTS = "routed_experts"
TEACHER_LOGPROBS = "teacher_logprobs"
STALE = "stale"
"""Not kept: computed from a sample's version spans when it is read."""


@dataclass
class KeptSample:
    """A sample as arrays; `columns` are token-aligned, routed experts lack the last token."""

    response_len: int
    finish_reason: str
    versions: tuple[VersionSpan, ...]
    text: str
    columns: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadRequest:
    """Asks for columns of samples, each laid end to end in the order of group_N and index_N.

    version     weights that are trained, for the column `stale`
    layers      the layers whose experts are read; empty: all
    ranges_R3   int64 (place in group_N, first token, end), the tokens whose experts are read, laid
                end to end in this order; None: those of all tokens
    """

    group_N: Array
    index_N: Array
    names: tuple[str, ...]
    version: int = 0
    layers: tuple[int, ...] = ()
    ranges_R3: Array | None = None


class UnknownSampleError(KeyError):
    """A sample is read that the store does not have; the message says which."""


class LostSampleError(KeyError):
    """A sample is read that the store had before it began anew; the message says which."""


class SampleStore:
    """Holds samples by group. Safe to use from several threads."""

    def __init__(
        self,
        num_experts: int = 0,
        first_group: int = 0,
        limit_bytes: float = 0,
        spill: SpillFiles | None = None,
    ) -> None:
        """Experts are kept in a byte each if the model has at most 256 of them.

        `first_group`: groups with smaller numbers were kept by a process that is gone. A group that
        would take the store beyond `limit_bytes` (0: none) goes to `spill`.
        """
        self._limit_bytes = limit_bytes
        self._num_bytes = 0
        self._spill = spill or SpillFiles("")
        self._first_group = first_group
        self._expert_dtype = np.uint8 if 0 < num_experts <= 256 else np.int16
        self._groups: dict[int, tuple[Prompt, list[KeptSample]]] = {}
        self._lock = threading.Lock()

    def put(self, group: int, samples: Sequence[Sample]) -> None:
        """Keep the samples of one prompt."""
        kept = [self._kept(sample) for sample in samples]
        if 0 < self._limit_bytes < self._num_bytes + _bytes_in_memory(kept):
            self._move_out(kept)
        with self._lock:
            assert group not in self._groups, f"group {group} is kept already"
            self._groups[group] = (samples[0].prompt, kept)
            self._num_bytes += _bytes_in_memory(kept)

    def drop(self, groups: Sequence[int]) -> None:
        """Forget groups; those that are not there are ignored."""
        with self._lock:
            for group in groups:
                _, kept = self._groups.pop(group, (None, []))
                self._num_bytes -= _bytes_in_memory(kept)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def num_bytes(self) -> int:
        """Return the memory that the columns take; those in files take none."""
        return self._num_bytes

    def samples(self, group_N: Sequence[int], index_N: Sequence[int]) -> list[Sample]:
        """Return whole samples, for rewards and logs."""
        return [
            _sample(*self._find(group, index), index)
            for group, index in zip(group_N, index_N, strict=True)
        ]

    def read(self, request: ReadRequest) -> dict[str, Array]:
        """Return the columns by name. Raises KeyError for an unknown column or sample."""
        pairs = zip(request.group_N.tolist(), request.index_N.tolist(), strict=True)
        found = [self._find(group, index)[1] for group, index in pairs]
        return {name: _laid_out(name, found, request) for name in request.names}

    def write(self, group_N: Array, index_N: Array, columns: Mapping[str, Array]) -> None:
        """Set columns of samples, each laid end to end in the order of group_N and index_N."""
        found = [
            self._find(group, index)[1]
            for group, index in zip(group_N.tolist(), index_N.tolist(), strict=True)
        ]
        ends = np.cumsum([len(sample.columns[TOKEN_IDS]) for sample in found])
        for name, values in columns.items():
            assert len(values) == (ends[-1] if len(ends) else 0), f"{name}: {values.shape}"
            if name == ROUTED_EXPERTS:
                values = values.astype(self._expert_dtype)
            for sample, part in zip(found, np.split(values, ends[:-1]), strict=True):
                own = part[:-1] if name == ROUTED_EXPERTS else part
                with self._lock:
                    self._num_bytes += own.nbytes - _in_memory(sample.columns.get(name))
                    # A copy: a view would keep the values of all samples alive.
                    sample.columns[name] = own.copy()

    def _move_out(self, group: Sequence[KeptSample]) -> None:
        """Move the columns of a new group to a file."""
        if not self._spill.num_bytes:
            _log.warning(
                "samples take more than rollout.store_gib=%g: further ones go to files in %s"
                " (rollout.spill_dir)",
                *(self._limit_bytes / 2**30, self._spill.folder),
            )
        names = list(group[0].columns)
        moved = iter(self._spill.move([sample.columns[n] for sample in group for n in names]))
        for sample in group:
            sample.columns = {name: next(moved) for name in names}

    def _kept(self, sample: Sample) -> KeptSample:
        prompt_ids = sample.prompt.token_ids
        num_tokens = len(prompt_ids) + sample.response_len
        token_ids = np.empty(num_tokens, np.int32)
        token_ids[: len(prompt_ids)] = prompt_ids
        token_ids[len(prompt_ids) :] = sample.response_ids
        logprobs = np.zeros(num_tokens, np.float32)
        logprobs[len(prompt_ids) :] = sample.logprobs
        columns = {TOKEN_IDS: token_ids, ROLLOUT_LOGPROBS: logprobs}
        if sample.routed_experts is not None:
            columns[ROUTED_EXPERTS] = sample.routed_experts.numpy().astype(self._expert_dtype)
        return KeptSample(
            sample.response_len, sample.finish_reason, sample.versions, sample.text, columns
        )

    def _find(self, group: int, index: int) -> tuple[Prompt, KeptSample]:
        with self._lock:
            entry = self._groups.get(group)
        if entry is None:
            kind = LostSampleError if group < self._first_group else UnknownSampleError
            raise kind(f"sample {index} of group {group} is not in the store")
        prompt, kept = entry
        return prompt, kept[index]


def _bytes_in_memory(group: Sequence[KeptSample]) -> int:
    return sum(_in_memory(array) for sample in group for array in sample.columns.values())


def _in_memory(array: Array | None) -> int:
    return 0 if array is None or isinstance(array, np.memmap) else array.nbytes


def _laid_out(name: str, samples: Sequence[KeptSample], request: ReadRequest) -> Array:
    if name == STALE:
        return np.concatenate([_stale(sample, request.version) for sample in samples])
    if name == ROUTED_EXPERTS:
        return _experts_laid_out(samples, request)
    return np.concatenate([sample.columns[name] for sample in samples])


def _experts_laid_out(samples: Sequence[KeptSample], request: ReadRequest) -> Array:
    """Return the experts of the request's tokens and layers.

    No engine has run a sample's last token: its experts are zeros, which readers mark as unknown.
    """
    if request.ranges_R3 is None:
        ranges = [(k, 0, len(sample.columns[TOKEN_IDS])) for k, sample in enumerate(samples)]
    else:
        ranges = request.ranges_R3.tolist()
    kept = [sample.columns[ROUTED_EXPERTS] for sample in samples]
    num_layers, topk = kept[0].shape[1:]
    layers = list(request.layers) or slice(None)
    shape = (
        sum(stop - first for _, first, stop in ranges),
        len(request.layers) or num_layers,
        topk,
    )
    laid_out = np.zeros(shape, kept[0].dtype)
    at = 0
    for k, first, stop in ranges:
        part = kept[k][first:stop, layers]
        laid_out[at : at + len(part)] = part
        at += stop - first
    return laid_out


def _stale(sample: KeptSample, version: int) -> Array:
    stale = np.zeros(len(sample.columns[TOKEN_IDS]), np.bool_)
    prompt_len = len(stale) - sample.response_len
    for span in sample.versions:
        stale[prompt_len + span.start : prompt_len + span.stop] = span.version != version
    return stale


def _sample(prompt: Prompt, kept: KeptSample, index: int) -> Sample:
    prompt_len = len(prompt.token_ids)
    experts = kept.columns.get(ROUTED_EXPERTS)
    return Sample(
        prompt=prompt,
        sample_index=index,
        response_ids=tuple(kept.columns[TOKEN_IDS][prompt_len:].tolist()),
        logprobs=tuple(kept.columns[ROLLOUT_LOGPROBS][prompt_len:].tolist()),
        finish_reason=kept.finish_reason,
        versions=kept.versions,
        text=kept.text,
        routed_experts=None if experts is None else torch.from_numpy(experts.astype(np.int16)),
    )
