"""Reads prompt files (parquet or jsonl) and returns their prompts, tokenized."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mcore_rl.data.columns import OURS, Columns
from mcore_rl.data.images.prompts import ImagePrompts
from mcore_rl.data.rows import (
    Row,
    get_mapping,
    ground_truth_of,
    load_rows,
    messages_of,
    refuse_images,
    require,
)
from mcore_rl.data.tokenization import Tokenization, Tokenizer
from mcore_rl.types import Prompt

logger = logging.getLogger(__name__)


def load_prompts(
    files: Sequence[str],
    tokenizer: Tokenizer,
    max_prompt_len: int,
    overlong: str,
    cache_dir: Path | None = None,
    images: ImagePrompts | None = None,
    columns: Columns = OURS,
) -> list[Prompt]:
    """Return all rows of `files`, tokenized with the chat template; `index` counts over all files.

    overlong    longer prompts: "filter" drops and counts them, "error" raises ValueError
    cache_dir   folder that keeps token ids; None keeps nothing
    images      makes the prompts of a model that sees images, by rules of its own; None: rows with
                images raise ValueError
    columns     those of the files
    """
    if images is not None:
        return _load_with_images(files, images, columns)
    rows = [(where, columns.convert(row, where)) for where, row in load_rows(files)]
    for where, row in rows:
        refuse_images(row, where)
    conversations = [messages_of(row, where) for where, row in rows]
    token_ids = Tokenization(tokenizer, cache_dir).encode(
        conversations,
        add_generation_prompt=True,
        files=files,
        column="prompt" if columns.are_ours else repr(columns),
    )
    prompts = [
        make_prompt(i, token_ids[i], conversations[i], where, row)
        for i, (where, row) in enumerate(rows)
    ]
    too_long = [p for p in prompts if len(p.token_ids) > max_prompt_len]
    if too_long and overlong == "error":
        first = too_long[0]
        raise ValueError(
            f"{len(too_long)} of {len(prompts)} prompts are longer than"
            f" data.max_prompt_len={max_prompt_len}, the first is row {first.index} with"
            f" {len(first.token_ids)} tokens: raise it, or set data.overlong=filter"
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


def _load_with_images(files: Sequence[str], images: ImagePrompts, columns: Columns) -> list[Prompt]:
    """Return the prompts of all rows that `images` does not leave out."""
    kept: list[Prompt] = []
    index = -1
    for name in files:
        for where, raw in load_rows([name]):
            row = columns.convert(raw, where)
            index += 1
            made = images.prompt(where, row, Path(name).parent)
            if made is not None:
                prompt = make_prompt(index, made.token_ids, messages_of(row, where), where, row)
                kept.append(replace(prompt, images=made.images))
    logger.info(
        "%d prompts with %d images from %s, %d overlong and %d with bad images left out",
        *(len(kept), sum(len(prompt.images) for prompt in kept), ", ".join(files)),
        *(images.left_out["overlong"], images.left_out["bad"]),
    )
    if not kept:
        raise ValueError(
            f"{', '.join(files)}: none of {index + 1} rows can be used: {dict(images.left_out)}"
        )
    return kept


def make_prompt(
    index: int,
    token_ids: tuple[int, ...],
    messages: tuple[dict[str, str], ...],
    where: str,
    row: Row,
) -> Prompt:
    """Return the prompt of a row. Raises ValueError if a column is absent or odd."""
    return Prompt(
        index=index,
        token_ids=token_ids,
        messages=messages,
        data_source=require(row, "data_source", where),
        ground_truth=ground_truth_of(row, where),
        extra_info=get_mapping(row, "extra_info", where),
    )
