"""Reads the rows of data files (parquet or jsonl), each with its place for error messages.

Prompt files are written with verl's columns.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.data.files import REWRITE
from mcore_rl.process.disk import PART, report_full_disk

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]


def load_rows(files: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield (place for error messages, row) of every row of the files, in order.

    Raises ValueError naming the file, and the row if there is one, for a missing file, an unknown
    suffix, or a row that cannot be read.
    """
    for name in files:
        path = Path(name)
        if not path.is_file():
            raise ValueError(
                f"data file {name} does not exist; `mcore-rl data --help` lists what can be"
                " prepared"
            )
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq  # starts a thread

            for i, row in enumerate(python_rows(pq.read_table(path), name)):
                yield f"{name} row {i}", row
        elif path.suffix == ".jsonl":
            yield from jsonl_rows(path)
        else:
            raise ValueError(f"data file {name}: expected .parquet or .jsonl; {REWRITE}")


def python_rows(table: "pa.Table", name: str) -> list[Row]:
    """Return the rows of a table of a parquet file; columns of maps become mappings.

    Raises ValueError naming the file if a map has a key twice.
    """
    try:
        return table.to_pylist(maps_as_pydicts="strict")
    except KeyError as error:
        raise ValueError(
            f"data file {name}: a map in it has a key twice ({error}); write a struct, or each key"
            " once"
        ) from None


def jsonl_rows(path: Path) -> Iterator[tuple[str, Row]]:
    r"""Yield (place, row) of every line that is not blank.

    Lines end at "\n" alone: U+0085, U+2028 and U+2029 may stand inside a JSON string. Raises
    ValueError naming file and line if a line is not UTF-8, not a JSON object, or has half of a
    surrogate pair, which no tokenizer can encode.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path} line {number}"
                yield where, parse_line(line, where)


def parse_line(line: bytes, where: str) -> Row:
    """Return the row of a line. Raises ValueError as jsonl_rows does."""
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error}; save it in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not a JSON object: {row!r:.100}")
    if b"\\ud" in line.lower():  # an escaped surrogate: the only way for half a pair to get in
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(
                f"{where} has half of a surrogate pair, {half!r}, which is no character:"
                " remove it from the file"
            ) from None
    return row


def require(row: Row, name: str, where: str) -> Any:
    """Return the value of a column. Raises ValueError if the row lacks it or it is null."""
    if row.get(name) is None:
        raise ValueError(f"{where} lacks `{name}`; it has {', '.join(sorted(row))}")
    return row[name]


def get_mapping(row: Row, name: str, where: str) -> Row:
    """Return the mapping in a column, which may be written as the JSON text of one; {} for none.

    Raises ValueError that names place, column and remedy for anything else.
    """
    value = row.get(name)
    if isinstance(value, Mapping):
        return value
    if value is None or value in ("", []):
        return {}
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = None
        if isinstance(parsed, dict):
            return parsed
    example = '{"ground_truth": "72"}' if name == "reward_model" else '{"name": "value"}'
    raise ValueError(
        f"{where}: `{name}` is the {type(value).__name__} {value!r:.100}, not a mapping: write an"
        f" object (in parquet a struct or a map) such as {example}, or its JSON text"
    )


def ground_truth_of(row: Row, where: str) -> Any:
    """Return `reward_model.ground_truth`. Raises ValueError if a row has none."""
    require(row, "reward_model", where)
    truth = get_mapping(row, "reward_model", where)
    return require(truth, "ground_truth", f"{where}: `reward_model`")


def messages_of(row: Row, where: str, column: str = "prompt") -> tuple[dict[str, Any], ...]:
    """Return the chat messages of a row. Raises ValueError if it has none."""
    messages = require(row, column, where)
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        raise ValueError(
            f"{where}: `{column}` is {messages!r:.100}, not a list of chat messages such as"
            ' [{"role": "user", "content": "2 + 2 ?"}]'
        )
    return tuple(dict(message) for message in messages)


def refuse_images(row: Row, where: str) -> None:
    """Raise ValueError if a row has images or videos: a text model would not see them."""
    for column in ("images", "videos"):
        if entries := row.get(column):
            raise ValueError(
                f"{where} has {len(entries)} `{column}`, but they are not read here: choose a"
                " vision-language model as model.path where it can be one (docs/vision.md), or"
                " remove the column"
            )


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
    import pyarrow as pa  # starts a thread: collectors import this module, too
    import pyarrow.parquet as pq

    temporary = path.with_name(path.name + PART)
    with report_full_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), temporary)
        temporary.replace(path)
