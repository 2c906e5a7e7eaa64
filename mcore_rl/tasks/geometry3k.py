"""Turns Geometry3K (arXiv:2105.04165), as hiyouga/geometry3k has it, into prompt files with images.

images, problem ("<image>Find x."), answer  -->  verl's columns: prompt, images, reward_model
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore_rl.data.images.placeholders import IMAGE
from mcore_rl.data.rows import Row, load_rows, prompt_row, required, write_parquet
from mcore_rl.tasks.downloads import files_of_split, source_folder

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
        problem = required(row, "problem", where)
        answer = required(row, "answer", where)
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
    images = required(row, "images", where)
    for number, image in enumerate(images):
        if not isinstance(image, dict) or not isinstance(image.get("bytes"), bytes):
            raise ValueError(f"{where}, image {number}: expected an object with `bytes`")
    return [{"bytes": image["bytes"]} for image in images]
