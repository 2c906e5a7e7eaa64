"""Runs on prompts with videos: engines and ranks see the same frames at the same times."""

from pathlib import Path

import pytest

from mcore_rl.data.rows import load_rows, write_parquet
from mcore_rl.tasks.shapes import prepare_shapes
from tests.e2e.test_vision import TWO_STEPS, check_agreement, settings_of
from tests.support.runs import Run
from tests.support.tiny_qwen3_vl import like_qwen3_vl

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
FRAMES = 3


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    """Prompts on videos of three pictures, which take two patches along time."""
    folder = tmp_path / "shapes"
    prepare_shapes(folder)
    rows = [dict(row) for _, row in load_rows([str(folder / "train.parquet")])][:200]
    pictures = [row.pop("images")[0] for row in rows]
    for number, row in enumerate(rows):
        [message] = row["prompt"]
        row["prompt"] = [{**message, "content": message["content"].replace("<image>", "<video>")}]
        frames = [pictures[(number + k) % len(pictures)] for k in range(FRAMES)]
        row["videos"] = [{"type": "video", "video": frames, "fps": 2.0}]
    write_parquet(rows, folder / "train.parquet")
    return folder


@pytest.mark.parametrize(
    ("kind", "num_pieces", "layout"),
    [
        ("qwen2_5_vl", 1, ("parallel.pp=2", "train.vision=all")),
        ("qwen3_vl", 2, ("parallel.tp=2", "train.vision=all")),
    ],
)
def test_engines_and_trainer_agree_on_videos(
    runs: list[Run], shapes: Path, tmp_path: Path, kind: str, num_pieces: int, layout: tuple[str]
) -> None:
    """Prompts of the evaluation have images."""
    model = shapes / "model"
    if kind == "qwen3_vl":
        model = like_qwen3_vl(model, tmp_path / "model", experts=False)
    settings = (*settings_of(shapes), *layout, *TWO_STEPS, f"model.path={model}")
    runs.append(Run(("train", *settings), tmp_path / "run"))
    check_agreement(runs[0], num_pieces)
