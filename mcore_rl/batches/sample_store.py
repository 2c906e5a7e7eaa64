"""Keeps the samples of one node near its engines, as arrays, until nobody refers to them.

A group is the samples of one prompt. A column has a value for each token of a sample, prompt and
response, and is None where it was never written:

    token_ids  rollout_logprobs  routed_experts      written when a group is sampled
    indexer_topk
    loss_mask  turn_rewards  turn                    of rows of episodes, written with them
    teacher_logprobs  old_logprobs  values  ...      written when they are computed

A sample of one turn is one row of these columns; an episode has as many as it takes. Log-probs may
be kept as bfloat16; they are read as float32 in any case.

Where memory is bounded, samples beyond the bound go to files, and are read from there. A file never
has a name: the disk gets its blocks back once nobody refers to its arrays, also when the process is
killed.
"""

import logging
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from mcore_rl.batches.episodes import (
    LOSS_MASK,
    ROLLOUT_LOGPROBS,
    TOKEN_IDS,
    TURN,
    columns_of_row,
    flat_response,
)
from mcore_rl.batches.kept_rows import (
    BFLOAT16,
    FLOAT32,
    INDEXER_TOPK,
    LOGPROBS,
    ROUTED_EXPERTS,
    KeptRow,
    ReadRequest,
    column_of,
    drop_implied,
    lay_out,
    restore_implied,
)
from mcore_rl.process.disk import report_full_disk
from mcore_rl.types import Array, PromptImage, Row, Sample, VersionSpan

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptGroup:
    """The samples of a prompt, without what their rows keep of them, and the rows of each."""

    samples: Sequence[Sample]
    rows_of: Sequence[Sequence[KeptRow]]

    @cached_property
    def rows(self) -> list[KeptRow]:
        return list(chain.from_iterable(self.rows_of))


class UnknownSampleError(KeyError):
    """A sample is read that the store does not have; the message says which."""


class LostSampleError(KeyError):
    """A sample is read that the store had before it began anew; the message says which."""


class SpillFiles:
    """Files of arrays in one folder."""

    def __init__(self, folder: str) -> None:
        """`folder` empty: the system's for temporary files. Raises ValueError if that is none."""
        self.folder = Path(folder or tempfile.gettempdir())
        if not self.folder.is_dir():
            raise ValueError(
                f"rollout.spill_dir={folder}: there is no such folder on this node; make it, or"
                " leave the option out to take the one for temporary files"
            )
        self.num_bytes = 0
        """Bytes moved so far."""

    def move(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the arrays as they lie in one new file, read-only.

        Raises DiskFullError, naming the folder, if there is no room for them.
        """
        with report_full_disk(self.folder), tempfile.TemporaryFile(dir=self.folder) as file:
            places = []
            for array in arrays:
                places.append(file.tell())
                file.write(np.ascontiguousarray(array).data)
            file.flush()
            self.num_bytes += file.tell()
            return [
                np.memmap(file, array.dtype, "r", place, array.shape) if array.size else array
                for array, place in zip(arrays, places, strict=True)
            ]


class SampleStore:
    """Holds samples by group. Safe to use from several threads."""

    def __init__(
        self,
        num_experts: int = 0,
        first_group: int = 0,
        limit_bytes: float = 0,
        spill: SpillFiles | None = None,
        logprob_dtype: str = FLOAT32,
    ) -> None:
        """Experts are kept in a byte each if the model has at most 256 of them.

        `first_group`: groups with smaller numbers were kept by a process that is gone. A group that
        would take the store beyond `limit_bytes` (0: none) goes to `spill`.

        logprob_dtype   that log-probs are kept as, FLOAT32 or BFLOAT16
        """
        self._logprob_dtype = logprob_dtype
        self._limit_bytes = limit_bytes
        self._num_bytes = 0
        self._spill = spill or SpillFiles("")
        self._first_group = first_group
        self._expert_dtype = np.uint8 if 0 < num_experts <= 256 else np.int16
        self._groups: dict[int, KeptGroup] = {}
        self._lock = threading.Lock()

    def put(self, group: int, samples: Sequence[Sample]) -> None:
        """Keep the samples of one prompt."""
        self.adopt(group, KeptGroup([*map(_without_tokens, samples)], [*map(self._rows, samples)]))

    def adopt(self, group: int, kept: KeptGroup) -> None:
        """Keep a group as a store has kept it."""
        rows = kept.rows
        if 0 < self._limit_bytes < self._num_bytes + _sum_memory(rows):
            self._move_out(rows)
        with self._lock:
            assert group not in self._groups, f"group {group} is kept already"
            self._groups[group] = kept
            self._num_bytes += _sum_memory(rows)

    def find(self, groups: Sequence[int]) -> list[KeptGroup]:
        """Return groups as they are kept. Raises KeyError as `samples` does."""
        return [self._find(group, 0) for group in groups]

    def drop(self, groups: Sequence[int]) -> None:
        """Forget groups; those that are not there are ignored."""
        with self._lock:
            for group in groups:
                kept = self._groups.pop(group, None)
                self._num_bytes -= _sum_memory(kept.rows) if kept else 0

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def num_bytes(self) -> int:
        """Return the memory that the columns take; those in files take none."""
        return self._num_bytes

    def samples(self, group_N: Sequence[int], index_N: Sequence[int]) -> list[Sample]:
        """Return whole samples, for rewards and logs."""
        return [
            _with_tokens(self._find(group, index), index)
            for group, index in zip(group_N, index_N, strict=True)
        ]

    def images(self, group: int, index: int) -> tuple[PromptImage, ...]:
        """Return the images of a row: of a single response, those of its prompt."""
        return self._find(group, index).rows[index].images

    def read(self, request: ReadRequest) -> dict[str, Array]:
        """Return the columns by name. Raises KeyError for an unknown column or sample."""
        pairs = zip(request.group_N.tolist(), request.index_N.tolist(), strict=True)
        found = [self._find(group, index).rows[index] for group, index in pairs]
        return {name: lay_out(name, found, request) for name in request.names}

    def write(self, group_N: Array, index_N: Array, columns: Mapping[str, Array]) -> None:
        """Set columns of samples, each laid end to end in the order of group_N and index_N."""
        found = [
            self._find(group, index).rows[index]
            for group, index in zip(group_N.tolist(), index_N.tolist(), strict=True)
        ]
        ends = np.cumsum([len(sample.columns[TOKEN_IDS]) for sample in found])
        for name, values in columns.items():
            assert len(values) == (ends[-1] if len(ends) else 0), f"{name}: {values.shape}"
            values = self._compact(name, values)
            for sample, part in zip(found, np.split(values, ends[:-1]), strict=True):
                own = part[:-1] if name == ROUTED_EXPERTS else part
                with self._lock:
                    self._num_bytes += own.nbytes - _count_memory(sample.columns.get(name))
                    # A copy: a view would keep the values of all samples alive.
                    sample.columns[name] = own.copy()

    def _move_out(self, group: Sequence[KeptRow]) -> None:
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

    def _rows(self, sample: Sample) -> list[KeptRow]:
        if sample.episode is not None:
            rows = [(row, columns_of_row(sample.episode, row)) for row in sample.episode.rows]
            return [self._row(row.versions, own, row, row.images) for row, own in rows]
        prompt_len = len(sample.prompt.token_ids)
        num_tokens = prompt_len + sample.response_len
        token_ids = np.empty(num_tokens, np.int32)
        token_ids[:prompt_len] = sample.prompt.token_ids
        token_ids[prompt_len:] = sample.response_ids
        logprobs = np.zeros(num_tokens, np.float32)
        logprobs[prompt_len:] = sample.logprobs
        versions = tuple(
            VersionSpan(prompt_len + span.start, prompt_len + span.stop, span.version)
            for span in sample.versions
        )
        columns = {TOKEN_IDS: token_ids, ROLLOUT_LOGPROBS: logprobs}
        return [self._row(versions, columns, sample, sample.prompt.images)]

    def _row(
        self,
        versions: tuple[VersionSpan, ...],
        columns: dict[str, Array],
        source: Sample | Row,
        images: tuple[PromptImage, ...],
    ) -> KeptRow:
        if source.routed_experts is not None:
            columns[ROUTED_EXPERTS] = source.routed_experts.numpy()
        if source.indexer_topk is not None:
            columns[INDEXER_TOPK] = drop_implied(source.indexer_topk.numpy())
        kept = {name: self._compact(name, values) for name, values in columns.items()}
        return KeptRow(versions, kept, images)

    def _compact(self, name: str, values: Array) -> Array:
        if name == ROUTED_EXPERTS:
            return values.astype(self._expert_dtype)
        if name in LOGPROBS and self._logprob_dtype == BFLOAT16:
            return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
        return values

    def _find(self, group: int, index: int) -> KeptGroup:
        with self._lock:
            entry = self._groups.get(group)
        if entry is None:
            kind = LostSampleError if group < self._first_group else UnknownSampleError
            raise kind(f"sample {index} of group {group} is not in the store")
        return entry


def _sum_memory(group: Sequence[KeptRow]) -> int:
    return sum(_count_memory(array) for sample in group for array in sample.columns.values())


def _count_memory(array: Array | None) -> int:
    return 0 if array is None or isinstance(array, np.memmap) else array.nbytes


def _without_tokens(sample: Sample) -> Sample:
    """Return a sample without what its rows keep."""
    episode = sample.episode and replace(sample.episode, rows=())
    return replace(
        sample,
        response_ids=(),
        logprobs=(),
        versions=(),
        routed_experts=None,
        indexer_topk=None,
        episode=episode,
    )


def _with_tokens(group: KeptGroup, index: int) -> Sample:
    """Return the sample with its tokens put back, for an episode its rows without experts."""
    sample, rows = group.samples[index], group.rows_of[index]
    if sample.episode is not None:
        parts = [
            (
                row.versions,
                {**row.columns, ROLLOUT_LOGPROBS: column_of(row, ROLLOUT_LOGPROBS)},
            )
            for row in rows
        ]
        images = {image.digest: image for row in rows for image in row.images}
        whole = tuple(
            Row(
                token_ids=columns[TOKEN_IDS],
                is_trained=columns[LOSS_MASK],
                logprobs=columns[ROLLOUT_LOGPROBS],
                turn_T=columns[TURN],
                versions=versions,
            )
            for versions, columns in parts
        )
        episode = replace(sample.episode, rows=whole, images=tuple(images.values()))
        return replace(sample, episode=episode, **flat_response(parts))
    [row] = rows
    prompt_len = len(sample.prompt.token_ids)
    experts, keys = row.columns.get(ROUTED_EXPERTS), row.columns.get(INDEXER_TOPK)
    num_run = len(row.columns[TOKEN_IDS]) - 1
    return replace(
        sample,
        response_ids=tuple(row.columns[TOKEN_IDS][prompt_len:].tolist()),
        logprobs=tuple(column_of(row, ROLLOUT_LOGPROBS)[prompt_len:].tolist()),
        versions=tuple(
            VersionSpan(span.start - prompt_len, span.stop - prompt_len, span.version)
            for span in row.versions
        ),
        routed_experts=None if experts is None else torch.from_numpy(experts.astype(np.int16)),
        indexer_topk=None if keys is None else torch.from_numpy(restore_implied(keys, 0, num_run)),
    )
