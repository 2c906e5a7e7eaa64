"""Prompt files (parquet or jsonl, verl's columns) and a tokenizer in, Prompts out."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq

from mcore_rl.types import Prompt

logger = logging.getLogger(__name__)
Row = Mapping[str, Any]


class Tokenizer(Protocol):
    """What is used of a HuggingFace tokenizer."""

    @property
    def apply_chat_template(self) -> Callable[..., Any]: ...


def load_prompts(
    files: Sequence[str], tokenizer: Tokenizer, max_prompt_len: int, overlong: str
) -> list[Prompt]:
    """All rows of `files`, tokenized with the chat template; `index` counts rows over all files.

    overlong   what happens to prompts of more than `max_prompt_len` tokens: "filter" drops and counts them,
               "error" raises ValueError with their number and the first of them
    """
    prompts = [
        _make_prompt(i, where, row, tokenizer) for i, (where, row) in enumerate(load_rows(files))
    ]
    too_long = [p for p in prompts if len(p.token_ids) > max_prompt_len]
    if too_long and overlong == "error":
        first = too_long[0]
        raise ValueError(
            f"{len(too_long)} of {len(prompts)} prompts are longer than"
            f" data.max_prompt_len={max_prompt_len}, the first"
            f" is row {first.index} with {len(first.token_ids)} tokens: raise it, or set data.overlong=filter"
        )
    kept = [p for p in prompts if len(p.token_ids) <= max_prompt_len]
    logger.info(
        "%d prompts from %s, %d overlong dropped", len(kept), ", ".join(files), len(too_long)
    )
    if not kept:
        raise ValueError(
            f"{', '.join(files)}: no prompt of at most {max_prompt_len} tokens among {len(prompts)}"
        )
    return kept


def load_conversations(files: Sequence[str]) -> list[list[dict[str, str]]]:
    """The `messages` column; every conversation must end with the assistant's answer."""
    conversations = []
    for where, row in load_rows(files):
        messages = [dict(m) for m in required(row, "messages", where)]
        if not messages or messages[-1].get("role") != "assistant":
            raise ValueError(f"{where}: `messages` must end with a message of role 'assistant'")
        conversations.append(messages)
    return conversations


def load_rows(files: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """(place for error messages, row) of every row."""
    for name in files:
        path = Path(name)
        if not path.is_file():
            raise ValueError(
                f"data file {name} does not exist; `mcore-rl data --help` lists what can be prepared"
            )
        if path.suffix == ".parquet":
            for i, row in enumerate(pq.read_table(path).to_pylist()):
                yield f"{name} row {i}", row
        elif path.suffix == ".jsonl":
            yield from _jsonl_rows(path)
        else:
            raise ValueError(f"data file {name}: expected .parquet or .jsonl")


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open("rb") as file:
        for i, line in enumerate(file):
            if line.strip():
                where = f"{path} line {i + 1}"
                yield where, _parse_row(line, where)


def _parse_row(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line.decode())
        if b"\\u" in line:  # only an escape can name half of a surrogate pair
            json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error}") from None
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start]).strip("'")
        raise ValueError(
            f"{where} has half of a surrogate pair, {half}, which is no character and has no tokens:"
            " write the character itself, or both halves"
        ) from None
    return row


def required(row: Row, name: str, where: str) -> Any:
    if row.get(name) is None:
        raise ValueError(f"{where} lacks `{name}`; it has {', '.join(sorted(row))}")
    return row[name]


def _make_prompt(index: int, where: str, row: Row, tokenizer: Tokenizer) -> Prompt:
    messages = tuple(dict(m) for m in required(row, "prompt", where))
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return Prompt(
        index=index,
        token_ids=tuple(ids),
        messages=messages,
        data_source=required(row, "data_source", where),
        ground_truth=required(required(row, "reward_model", where), "ground_truth", where),
        extra_info=row.get("extra_info") or {},
    )
