"""Turns published data sets, GSM8K and Geometry3K, into prompt files.

A source is a local folder, or the name of a data set on the Hugging Face hub.

    GSM8K        question, answer ("... #### 7")          -->  prompt, reward_model; conversations
    Geometry3K   images, problem ("<image>Find x."), answer  -->  prompt, images, reward_model

Sources: arXiv:2110.14168; arXiv:2105.04165, as hiyouga/geometry3k has it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.data.images.encoded import IMAGE
from mcore_rl.data.rows import Row, load_rows, prompt_row, require, write_parquet


def source_folder(source: str, patterns: Sequence[str]) -> Path:
    """Return the folder `source`, or the copy of the hub's data set of this name.

    `patterns`: files to download. Raises ValueError if there is neither.
    """
    return Path(source) if Path(source).is_dir() else _download(source, patterns)


def files_of_split(folder: Path, split: str) -> list[str]:
    """Return the parquet and jsonl files with the split in their names, in order.

    Raises ValueError if there is none.
    """
    files = sorted(
        p for p in folder.rglob("*") if split in p.name and p.suffix in (".parquet", ".jsonl")
    )
    if not files:
        raise ValueError(f"{folder}: no .parquet or .jsonl file with {split!r} in its name")
    return [str(path) for path in files]


def _download(name: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        copy = snapshot_download(name, repo_type="dataset", allow_patterns=list(patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        raise ValueError(
            f"--source {name}: neither a local folder nor reachable on the hub"
            f" ({type(error).__name__}); download it elsewhere and give the folder"
        ) from None
    return Path(copy)


GEOMETRY3K_INSTRUCTION = "Think step by step, and put the final answer in \\boxed{}."
GEOMETRY3K_SPLITS = (("train", "train"), ("validation", "validation"), ("test", "heldout"))
"""Split there -> name of the file here."""
GEOMETRY3K = "hiyouga/geometry3k"


def prepare_geometry3k(source: str, out_dir: Path) -> None:
    """Write train.parquet, validation.parquet and heldout.parquet (its test split) to `out_dir`.

    source   folder with parquet or jsonl files whose names contain the splits, or the name of a
             dataset on the hub

    Raises ValueError naming the file and row of what is missing or malformed.
    """
    folder = source_folder(source, ["data/*", "*.parquet"])
    for split, name in GEOMETRY3K_SPLITS:
        rows = list(_make_geometry3k_rows(folder, split))
        write_parquet(rows, out_dir / f"{name}.parquet")
        print(f"{len(rows)} problems in {out_dir / f'{name}.parquet'}")


def _make_geometry3k_rows(folder: Path, split: str) -> Iterator[dict[str, Any]]:
    files = files_of_split(folder, split)
    for i, (where, row) in enumerate(load_rows(files)):
        problem = require(row, "problem", where)
        answer = require(row, "answer", where)
        images = _images(row, where)
        num_named = problem.count(IMAGE)
        if num_named != len(images):
            raise ValueError(
                f"{where} has {len(images)} images, but its problem has {num_named} {IMAGE}"
            )
        made = prompt_row(f"{problem} {GEOMETRY3K_INSTRUCTION}", answer, GEOMETRY3K, split, i)
        yield {**made, "images": images}


def _images(row: Row, where: str) -> list[dict[str, bytes]]:
    """Return the encoded images of a row. Raises ValueError if one is not there as bytes."""
    images = require(row, "images", where)
    for number, image in enumerate(images):
        if not isinstance(image, dict) or not isinstance(image.get("bytes"), bytes):
            raise ValueError(f"{where}, image {number}: expected an object with `bytes`")
    return [{"bytes": image["bytes"]} for image in images]


GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def prepare_gsm8k(source: str, out_dir: Path) -> None:
    """Write train.parquet, heldout.parquet (its test split) and sft.parquet to `out_dir`.

    source   folder with parquet or jsonl files whose names contain "train" and "test", or the name
             of a dataset on the hub

    Raises ValueError naming what is missing or malformed.
    """
    folder = source_folder(source, ["main/*"])
    for split, name in (("train", "train"), ("test", "heldout")):
        rows = list(_read_gsm8k(folder, split))
        prompts = [
            prompt_row(
                f"{question} {GSM8K_INSTRUCTION}", final_answer(answer), "openai/gsm8k", split, i
            )
            for i, (question, answer) in enumerate(rows)
        ]
        write_parquet(prompts, out_dir / f"{name}.parquet")
        if split == "train":
            write_parquet([_make_conversation(*row) for row in rows], out_dir / "sft.parquet")
        print(f"{len(rows)} problems in {out_dir / f'{name}.parquet'}")


def final_answer(answer: str) -> str:
    """Return the number after "####", without thousands separators."""
    _, mark, final = answer.rpartition("####")
    if not mark:
        raise ValueError(f"a GSM8K answer without '####': {answer[-80:]!r}")
    return final.strip().replace(",", "")


def _make_conversation(question: str, answer: str) -> dict[str, list[dict[str, str]]]:
    content = f"{question} {GSM8K_INSTRUCTION}"
    return {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    }


def _read_gsm8k(folder: Path, split: str) -> Iterator[tuple[str, str]]:
    """Yield (question, answer) of a split. Raises ValueError if there is no file or a column is
    missing.
    """
    for where, row in load_rows(files_of_split(folder, split)):
        if not {"question", "answer"} <= row.keys():
            raise ValueError(f"{where}: expected `question` and `answer`, found {sorted(row)}")
        yield row["question"], row["answer"]
