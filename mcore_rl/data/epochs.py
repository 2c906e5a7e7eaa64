"""Turns passes over prompt files into steps of a run."""

import logging
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.data.files import data_files
from mcore_rl.data.streamed.index import open_parquet

_log = logging.getLogger(__name__)


def count_steps(epochs: float, paths: Sequence[str], prompts_per_step: int) -> int:
    """Return the steps that draw each row of the files `epochs` times, at least one.

    Rows are counted before prompts that are too long are left out. Raises ValueError as data_files
    does.
    """
    num_rows = sum(map(_count_rows, data_files(paths)))
    steps = max(1, int(epochs * num_rows // prompts_per_step))
    _log.info("run.epochs=%g of %s prompts: run.steps=%s", epochs, f"{num_rows:,}", f"{steps:,}")
    return steps


def _count_rows(file: str) -> int:
    if file.endswith(".parquet"):
        return open_parquet(file).metadata.num_rows
    with Path(file).open("rb") as lines:
        return sum(1 for line in lines if line.strip())
