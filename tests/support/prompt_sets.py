"""Writes data sets of prompts over several files, and opens them as streams."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.config import CurriculumConfig
from mcore_rl.data.curriculum import Curriculum
from mcore_rl.data.rows import prompt_row
from mcore_rl.data.streamed.index import RowIndex, index_rows
from mcore_rl.data.streamed.mixed import MixedPrompts, MixedSource
from mcore_rl.data.streamed.prompts import RowRules, StreamedPrompts
from mcore_rl.data.streamed.windows import Windows
from mcore_rl.data.streamed.workers import TokenWorkers
from mcore_rl.loops.evaluation import Correctness
from mcore_rl.tasks.arithmetic import make_tokenizer
from mcore_rl.types import Prompt
from mcore_rl.types.scores import Scores

QUESTION = "Ada has {} apples and gets 4 more . how many apples does Ada have now ?"
LONGER = "there are 4 coins in the box . "
RULES = RowRules(max_prompt_len=64, overlong="filter")
BY_DIFFICULTY = RowRules(64, "filter", "extra_info.difficulty")


def make_row(number: int, is_long: bool = False) -> dict[str, Any]:
    """Return a row whose ground truth is `number`; its difficulty is `number` / 10."""
    question = (LONGER * 20 if is_long else "") + QUESTION.format(number % 28)
    row = prompt_row(question, str(number), "unit", "train", number)
    row["extra_info"]["difficulty"] = number / 10
    return row


def write_rows(
    folder: Path,
    sizes: Sequence[int],
    kind: str = "parquet",
    group_rows: int = 7,
    long_rows: Sequence[int] = (),
) -> list[str]:
    """Write a file for each of `sizes`, a number of rows that goes on over the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    begin = 0
    for i, size in enumerate(sizes):
        rows = [make_row(number, number in long_rows) for number in range(begin, begin + size)]
        path = folder / f"{i}.{kind}"
        if kind == "parquet":
            schema = pa.Table.from_pylist([make_row(0)]).schema
            pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=group_rows)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files.append(str(path))
        begin += size
    return files


def open_index(files: Sequence[str], chunk_bytes: int = 400, rules: RowRules = RULES) -> RowIndex:
    """Return an index whose chunks have a few rows."""
    return index_rows(files, rules.columns, chunk_bytes, rules.check_columns)


def open_source(
    files: Sequence[str],
    rules: RowRules = RULES,
    seed: int = 0,
    shuffle: bool = True,
    lookahead: int = 50,
    first_index: int = 0,
    chunk_bytes: int = 400,
) -> StreamedPrompts:
    """Return a data set that is tokenized in this process."""
    windows = Windows(open_index(files, chunk_bytes, rules), rules.columns, seed, shuffle)
    workers = TokenWorkers(make_tokenizer, num_workers=0)
    return StreamedPrompts(windows, workers, rules, lookahead, first_index)


def open_mixed(
    sets: Sequence[Sequence[str]],
    weights: Sequence[float] = (1.0,),
    seed: int = 0,
    curriculum: CurriculumConfig | None = None,
    lookahead: int = 50,
    rules: RowRules = RULES,
) -> MixedPrompts:
    """Return a stream over data sets, each a list of files."""
    sources = []
    num_rows = 0
    for number, (files, weight) in enumerate(zip(sets, weights, strict=True)):
        prompts = open_source(files, rules, seed * 9 + number, True, lookahead, num_rows)
        sources.append(MixedSource(f"set{number}", weight, prompts))
        num_rows += prompts.num_rows
    rule = Curriculum(curriculum or CurriculumConfig(), seed, num_rows)
    return MixedPrompts(sources, seed, rule, are_right, close=lambda: None)


def are_right(scores: Scores) -> list[bool | None]:
    return Correctness("", 1.0).are_correct(scores)


def numbers_of(prompts: Sequence[Prompt]) -> list[int]:
    """Return the numbers of the rows that prompts were made of; see make_row."""
    return [int(prompt.ground_truth) for prompt in prompts]
