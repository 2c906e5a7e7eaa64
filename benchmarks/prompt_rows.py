"""Generates rows of prompts in parquet or jsonl files, and a tokenizer for them, for benchmarks."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mcore_rl.data.rows import prompt_row
from mcore_rl.tasks.tiny_models import CHAT_TEMPLATE


def generate(folder: Path, num_rows: int, num_files: int, kind: str, group_rows: int) -> None:
    """Write folder/rows, unless it has them, and folder/tokenizer. kind: parquet or jsonl."""
    rows_per_file = -(-num_rows // num_files)
    for number in range(num_files):
        path = folder / "rows" / f"{number:05}.{kind}"
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            stop = min(num_rows, (number + 1) * rows_per_file)
            _write(path, range(number * rows_per_file, stop), group_rows)
    texts = [make_row(i)["prompt"][0]["content"] for i in range(2000)]
    make_tokenizer(texts).save_pretrained(folder / "tokenizer")


def make_row(number: int) -> dict[str, Any]:
    """Return a word problem with a few sentences, the same in every run."""
    rng = random.Random(number)
    numbers = [rng.randrange(1000) for _ in range(rng.randrange(2, 7))]
    steps = " Then".join(f" {n} apples are added to the basket." for n in numbers)
    question = f"Problem {number}.{steps} How many apples are in the basket?"
    row = prompt_row(question, str(sum(numbers)), "made", "train", number)
    row["extra_info"]["difficulty"] = (len(numbers) - 2) / 4
    return row


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a chat template."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer
    tokenizer.train_from_iterator(texts, trainer(vocab_size=2048, initial_alphabet=alphabet))
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _write(path: Path, numbers: range, group_rows: int) -> None:
    temporary = path.with_suffix(".tmp")
    if path.suffix == ".jsonl":
        with temporary.open("w") as file:
            file.writelines(json.dumps(make_row(number)) + "\n" for number in numbers)
    else:
        schema = pa.Table.from_pylist([make_row(0)]).schema
        with pq.ParquetWriter(temporary, schema) as writer:
            for start in numbers[::group_rows]:
                group = [make_row(i) for i in range(start, min(start + group_rows, numbers.stop))]
                writer.write_table(pa.Table.from_pylist(group, schema), row_group_size=group_rows)
    temporary.replace(path)
