"""Cuts a step's stored samples into parts: whole prompts that mostly lie in the same store."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mcore_rl.batches.batch import rows_of_samples
from mcore_rl.batches.stored_batch import select_stored
from mcore_rl.types import StoredBatch, StoredSample

PART_TOKENS = 1 << 20
"""Tokens of a part, prompts included; the samples of a prompt stay together even if they are more.

Advantages take about 100 bytes of memory per token.
"""


@dataclass(frozen=True)
class StepPart:
    """Samples of a step: their places among its samples, rising, and the batch of their rows."""

    places: tuple[int, ...]
    batch: StoredBatch


def take_whole(batch: StoredBatch, samples: Sequence[StoredSample]) -> list[StepPart]:
    """Return the whole step as one part."""
    return [StepPart(tuple(range(len(samples))), batch)]


def cut_by_prompts(
    batch: StoredBatch, samples: Sequence[StoredSample], most_tokens: int
) -> list[StepPart]:
    """Return parts that have all samples of their prompts, each sample in one part.

    `batch` was made of `samples`. Prompts without any token are left out.
    """
    with_rows = [place for place, sample in enumerate(samples) if sample.response_len]
    rows_of = dict(zip(with_rows, rows_of_samples(batch), strict=True))
    lens_N = np.array(batch.lens_N)
    prompts: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        prompts.setdefault(sample.prompt.index, []).append(place)
    open_parts: dict[int, list[int]] = {}
    num_tokens: dict[int, int] = {}
    parts: list[list[int]] = []
    for places in prompts.values():
        rows = _rows(rows_of, places)
        if not rows:
            continue
        home = _home(batch.store_N[rows], lens_N[rows])
        own_tokens = int(lens_N[rows].sum())
        if num_tokens.get(home, most_tokens) + own_tokens > most_tokens:
            open_parts[home] = []
            num_tokens[home] = 0
            parts.append(open_parts[home])
        open_parts[home] += places
        num_tokens[home] += own_tokens
    return [_make_part(batch, rows_of, sorted(places)) for places in parts]


def home_of(batch: StoredBatch) -> int:
    """Return the store of most of a batch's tokens."""
    return _home(batch.store_N, np.array(batch.lens_N))


def _home(store_N: np.ndarray, lens_N: np.ndarray) -> int:
    return int(np.bincount(store_N, weights=lens_N).argmax())


def _rows(rows_of: dict[int, list[int]], places: Iterable[int]) -> list[int]:
    return [row for place in places for row in rows_of.get(place, ())]


def _make_part(
    batch: StoredBatch, rows_of: dict[int, list[int]], places: Sequence[int]
) -> StepPart:
    part = select_stored(batch, _rows(rows_of, places))
    if part.sample_N is not None:
        part = replace(part, sample_N=np.unique(part.sample_N, return_inverse=True)[1])
    return StepPart(tuple(places), part)
