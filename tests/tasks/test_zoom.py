"""Questions are about a cell that is not empty, and demonstrations show what the tool would."""

import io
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image
from transformers import AutoTokenizer

from mcore_rl.agents.environments.crop_env import CropEnvironment, CropOptions
from mcore_rl.agents.environments.environment import find_images, make_image_part
from mcore_rl.tasks.shapes import (
    CELL,
    COLORS,
    VIEW,
    demonstrate_zoom,
    make_zoom_problem,
    prepare_zoom,
)


def test_the_answer_is_the_color_of_the_cell() -> None:
    chance = random.Random(2)
    for _ in range(100):
        problem = make_zoom_problem(chance)
        image = np.asarray(Image.open(io.BytesIO(problem.picture)))
        x, y = problem.column * CELL, problem.row * CELL
        pixels = image[y : y + CELL, x : x + CELL].reshape(-1, 3).tolist()
        found = {name for name, rgb in COLORS.items() if list(rgb) in pixels}
        assert found == {problem.answer}


def test_demonstrations_show_what_the_environment_shows() -> None:
    chance = random.Random(0)
    options = CropOptions(view_pixels=VIEW, zoom_pixels=VIEW, units=3)
    num_looks = 0
    for _ in range(40):
        problem = make_zoom_problem(chance)
        rows = demonstrate_zoom(problem, chance)
        environment = CropEnvironment(options)
        content = [make_image_part(problem.picture)]
        task = {"messages": [{"content": content}], "ground_truth": problem.answer}
        pictures = find_images(environment.reset(task).messages)
        assert [image["bytes"] for image in rows[0]["images"]] == pictures
        if len(rows) == 2:
            num_looks += 1
            step = environment.step(rows[0]["messages"][-1])
            pictures += find_images(step.messages)
            assert [image["bytes"] for image in rows[1]["images"]] == pictures
            assert environment.step(rows[1]["messages"][-1]).reward == 1.0
    assert 10 < num_looks < 30


def test_files_are_those_of_the_recipe(tmp_path: Path) -> None:
    prepare_zoom(tmp_path, seed=5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = pq.read_table(tmp_path / "sft.parquet").to_pylist()
    for row in rows[:200]:
        texts = [message["content"].replace("<image>", "") for message in row["messages"]]
        ids = [token for text in texts for token in tokenizer(text)["input_ids"]]
        assert tokenizer.pad_token_id not in ids
        assert sum(message["content"].count("<image>") for message in row["messages"]) == len(
            row["images"]
        )
    for name in ("train", "heldout"):
        assert all(
            len(r["images"]) == 1 for r in pq.read_table(tmp_path / f"{name}.parquet").to_pylist()
        )
