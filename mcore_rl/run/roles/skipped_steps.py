"""Keeps the batches of optimizer steps that ranks left out, as a loss or gradient was not finite.

stats of a step --> not finite? --> skipped/policy_000012.jsonl --> too many in a row? --> the end

A file has a row for each of the first sequences: where its sample lies, the token ids, which of
them are trained, and advantages and log-probs of these.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np

from mcore_rl.batches.batch import select_each
from mcore_rl.batches.stored_batch import select_stored
from mcore_rl.batches.summary import SKIPPED
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.process.disk import DiskFullError, write_whole
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.types import StepStats, StoredBatch, TrainBatch

MAX_FILES = 16
"""Batches that are kept; the first ones tell most."""
MAX_TOKENS = 1 << 18
"""Tokens of the sequences in a file, at most; one sequence in any case."""
_PLACE = ("store", "group", "index")
_COLUMNS = (
    "advantages_T",
    "returns_T",
    "values_T",
    "rollout_logprobs_T",
    "old_logprobs_T",
    "ref_logprobs_T",
)
_log = logging.getLogger(__name__)
Fetch = Callable[[StoredBatch], TrainBatch]
"""Brings the tokens of a batch here."""


class NotFiniteStepsError(RuntimeError):
    """More optimizer steps in a row were left out than the recipe allows."""


class SkippedSteps:
    """The steps of one model that were left out."""

    def __init__(
        self, folder: RunFolder, model: str, most: int, fetch: Fetch | None = None
    ) -> None:
        """`most`: steps in a row that may be left out. `fetch` is needed for StoredBatches."""
        self._folder = folder.path / "skipped"
        self._model = model
        self._most = most
        self._fetch = fetch
        self._num_in_row = 0

    def note(self, batch: TrainBatch | StoredBatch, stats: StepStats) -> bool:
        """Return whether the step on `batch` was left out; keep the batch if it was not finite.

        Raises NotFiniteStepsError if that was one step too many in a row.
        """
        is_skipped = bool(stats.metrics.get(SKIPPED))
        if math.isfinite(stats.loss) and math.isfinite(stats.grad_norm):
            self._num_in_row = 0
            if is_skipped:
                _log.warning(
                    "an optimizer step of the %s was skipped: its gradient norm %g is above the"
                    " optimizer's grad_norm_skip_threshold",
                    *(self._model, stats.grad_norm),
                )
            return is_skipped
        self._num_in_row += 1
        message = (
            f"an optimizer step of the {self._model} was skipped: its loss is {stats.loss:g} and"
            f" its gradient norm {stats.grad_norm:g}; weights and moments are as before it."
            f" {self._keep(batch)}"
        )
        if self._num_in_row > self._most:
            raise NotFiniteStepsError(
                f"{message}\nThat was step {self._num_in_row} in a row, and max_nonfinite="
                f"{self._most} of the optimizer are left out (docs/debugging.md#weights)"
            )
        _log.warning("%s (%d in a row, at most %d)", message, self._num_in_row, self._most)
        return True

    def _keep(self, batch: TrainBatch | StoredBatch) -> str:
        """Write the first sequences of a batch to a file; return what became of that."""
        found = list(self._folder.glob("*.jsonl"))
        if len(found) >= MAX_FILES:
            return f"Its batch is not kept: {self._folder} has {MAX_FILES} others"
        numbers = [int(path.stem.rpartition("_")[2]) for path in found]
        path = self._folder / f"{self._model}_{max(numbers, default=0) + 1:06d}.jsonl"
        try:
            write_whole(path, "".join(map(_encode, self._list_rows(batch))))
        except (OSError, DiskFullError, SamplesLostError) as error:  # the run is worth more
            return f"Its batch is not kept: {error}"
        return f"Its batch is in {path}"

    def _list_rows(self, batch: TrainBatch | StoredBatch) -> Iterator[dict[str, Any]]:
        """Yield a row for each of the first sequences of a batch."""
        ends = accumulate(batch.lens_N)
        chosen = [n for n, end in enumerate(ends) if not n or end <= MAX_TOKENS]
        places: list[dict[str, int]] = [{}] * len(chosen)
        if isinstance(batch, StoredBatch):
            assert self._fetch is not None, "a StoredBatch without a way to its tokens"
            batch = select_stored(batch, chosen)
            at_N3 = np.stack([batch.store_N, batch.group_N, batch.index_N], axis=1).tolist()
            places = [dict(zip(_PLACE, at, strict=True)) for at in at_N3]
            batch = self._fetch(batch)
        else:
            [batch] = select_each(batch, [chosen])
        values = {name: column for name in _COLUMNS if (column := getattr(batch, name)) is not None}
        first = 0
        for number, (num_tokens, place) in enumerate(zip(batch.lens_N, places, strict=True)):
            tokens = slice(first, first + num_tokens)
            first += num_tokens
            trained_T = batch.loss_mask_T[tokens]
            yield {
                "sequence": number,
                **place,
                "token_ids": batch.token_ids_T[tokens].tolist(),
                "trained": trained_T.nonzero()[:, 0].tolist(),
                **{
                    name.removesuffix("_T"): column[tokens][trained_T].tolist()
                    for name, column in values.items()
                },
            }


def _encode(row: dict[str, Any]) -> str:
    """Return a row as a line of JSON, which has no NaN: numbers that are not finite become null."""
    return json.dumps({name: _hide_not_finite(value) for name, value in row.items()}) + "\n"


def _hide_not_finite(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [v if math.isfinite(v) else None for v in value]
