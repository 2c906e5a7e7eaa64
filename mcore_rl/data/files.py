"""Writes rows to parquet files in verl's columns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.process.disk import PART, reporting_full_disk


def prompt_row(
    question: str, answer: str, data_source: str, split: str, index: int
) -> dict[str, Any]:
    """Return a row in verl's columns: prompt, data_source, ability, reward_model, extra_info."""
    return {
        "prompt": [{"role": "user", "content": question}],
        "data_source": data_source,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index},
    }


def write_prompts(
    problems: Sequence[tuple[str, str]], data_source: str, split: str, out_dir: Path
) -> None:
    """Write (question, answer) pairs as the prompt file `<out_dir>/<split>.parquet`."""
    rows = [
        prompt_row(question, answer, data_source, split, i)
        for i, (question, answer) in enumerate(problems)
    ]
    write_parquet(rows, out_dir / f"{split}.parquet")


def write_parquet(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the rows, under a temporary name first, so that a file at `path` is always complete."""
    temporary = path.with_name(path.name + PART)
    with reporting_full_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), temporary)
        temporary.replace(path)
