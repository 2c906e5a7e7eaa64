"""Refuses data files whose first row cannot be read, or has other columns; imports no torch."""

from pathlib import Path

from mcore_rl.data.columns import Columns
from mcore_rl.data.rows import ground_truth_of, jsonl_rows, require
from mcore_rl.process.disk import check_readable


def check_first_row(file: Path, columns: Columns | None) -> None:
    """Raise ValueError if a file of rows has none, or if the first one lacks a column.

    columns   of prompts; None: any columns will do here

    What parquet files say of their columns is compared; no row of theirs is read.
    """
    check_readable(file)
    if file.suffix == ".parquet":
        _check_parquet(file, columns)
        return
    where, row = next(jsonl_rows(file), ("", None))
    if row is None:
        raise ValueError(f"data file {file} has no rows: write a JSON object on each line")
    if columns is None:
        return
    try:
        columns.convert(row, where)
        if columns.are_ours:
            for name in (columns.prompt, columns.data_source):
                require(row, name, where)
            ground_truth_of(row, where)
    except ValueError as error:
        raise ValueError(f"{error}; {_advise(columns)}") from None


def _check_parquet(file: Path, columns: Columns | None) -> None:
    import pyarrow.parquet as pq  # starts a thread
    from pyarrow import ArrowException

    try:
        metadata = pq.read_metadata(file)
    except (ArrowException, OSError) as error:
        raise ValueError(
            f"data file {file} is no parquet file: {error}; write or download it again"
        ) from None
    if not metadata.num_rows:
        raise ValueError(f"data file {file} has no rows: write or download it again")
    there = metadata.schema.to_arrow_schema().names
    needed = [name.partition(".")[0] for name in columns.needed] if columns else []
    if missing := [name for name in needed if name not in there]:
        assert columns is not None
        raise ValueError(
            f"data file {file} lacks {', '.join(f'`{name}`' for name in missing)};"
            f" it has {', '.join(sorted(there))}; {_advise(columns)}"
        )


def _advise(columns: Columns) -> str:
    return (
        f"data.columns names others than {', '.join(columns.needed)}, one by one or by the preset"
        " of another system (docs/recipes.md)"
    )
