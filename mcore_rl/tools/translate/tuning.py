"""Holds what recipes for `mcore-rl sft` and `mcore-rl dpo` have in common.

Optimizer and steps are found as those of `mcore-rl train`, and named at the end:

    train.optimizer.lr, run.steps   -->   sft.optimizer.lr, sft.steps
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from mcore_rl.tools.translate.translation import Decision, Found, RecipeLine, Translation

NO_SAMPLING = "nothing is sampled, rewarded or compared: answers are given"
LAST_ANSWER = (
    "the last answer of a conversation is trained on, and those before it are read alone: write a"
    " conversation with several answers as several rows"
)
ALWAYS_SHUFFLED = "conversations are always shuffled"
NO_EVALUATION = "nothing is evaluated: `mcore-rl eval` evaluates <run.dir>/hf"
MESSAGES = "conversations are a list in the column `messages` that ends with the answer"
OWN_NAMES = ("train.optimizer", "run.steps")
"""Options of `mcore-rl train` that the other commands have in a group of their own."""


def name_for_command(translation: Translation) -> Translation:
    """Return the translation with optimizer and steps under the names that its command reads."""
    command = translation.command
    if command == "train":
        return translation
    lines = [replace(item, key=_rename(item.key, command)) for item in translation.lines]
    decisions = [
        replace(item, advice=_rename(item.advice, command)) for item in translation.decisions
    ]
    return replace(translation, lines=tuple(lines), decisions=tuple(decisions))


def _rename(text: str, command: str) -> str:
    for name in OWN_NAMES:
        text = text.replace(name, f"{command}.{name.partition('.')[2]}")
    return text


def count_rows(paths: Sequence[str]) -> int | None:
    """Return the rows of parquet files; None without files, or if one is not here."""
    files = [Path(path) for path in paths]
    if not files or not all(file.is_file() and file.suffix == ".parquet" for file in files):
        return None
    return sum(pq.read_metadata(file).num_rows for file in files)


def translate_passes(
    epochs: Any, files: Sequence[str], batch_size: int, sources: tuple[str, ...]
) -> Found:
    """Yield the optimizer steps of so many passes over `files`; sources[0] is the passes."""
    rows = count_rows(files)
    if rows is not None:
        steps = max(round(epochs * rows) // batch_size, 1)
        yield RecipeLine("run.steps", steps, sources)
        return
    advice = f"set run.steps: the rows of the files times this, by {batch_size}"
    yield Decision(sources[0], epochs, advice)
