"""Geometry3K from a local copy, as rows made by hand."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mcore_rl.data.images.encoded import read_encoded_images, with_image_parts
from mcore_rl.data.rows import write_parquet
from mcore_rl.tasks.published import prepare_geometry3k
from tests.support.odd_images import encode, noise


def row_of(problem: str, answer: str, *images: Any) -> dict[str, Any]:
    return {"images": list(images), "problem": problem, "answer": answer}


def write_splits(folder: Path, *rows: dict[str, Any]) -> None:
    for split in ("train", "validation", "test"):
        write_parquet(rows, folder / "data" / f"{split}-00000-of-00001.parquet")


def test_problems_become_prompts_with_images(tmp_path: Path) -> None:
    pictures = [encode(noise(12, 8, seed=seed)) for seed in range(3)]
    images = [{"bytes": picture, "path": None} for picture in pictures]
    write_splits(
        tmp_path,
        row_of("<image>Find $x$.", "3", images[0]),
        row_of("<image><image> Which is larger?", "2 \\sqrt { 221 }", *images[1:]),
    )
    prepare_geometry3k(str(tmp_path), tmp_path / "out")
    for name, split in (("train", "train"), ("validation", "validation"), ("heldout", "test")):
        first, second = pq.read_table(tmp_path / "out" / f"{name}.parquet").to_pylist()
        assert first["prompt"][0]["content"].startswith("<image>Find $x$. Think")
        assert first["prompt"][0]["content"].endswith("\\boxed{}.")
        assert second["reward_model"]["ground_truth"] == "2 \\sqrt { 221 }"
        assert second["extra_info"] == {"split": split, "index": 1}
        found = read_encoded_images(second, "row 1", tmp_path)
        assert [image.data for image in found] == pictures[1:]
        assert with_image_parts(second["prompt"], 2, "row 1")[0]["content"][0] == {"type": "image"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (row_of("Find x.", "3", {"bytes": b"a"}), r"row 0 has 1 images, but its problem has 0"),
        (row_of("<image>", "3", {"path": "a.png"}), r"row 0, image 0: expected an object with"),
        ({"images": [{"bytes": b"a"}], "problem": "<image>"}, r"row 0 lacks `answer`"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    write_splits(tmp_path, row)
    with pytest.raises(ValueError, match=message):
        prepare_geometry3k(str(tmp_path), tmp_path / "out")
