"""SGLang serves Kimi-K2.5 by our class and processors, as long as its own take other sizes.

Once its own class builds the tower of config.json, ours is needed for the processors alone.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.rollout.vision_models.kimi_processor import PLACEHOLDER, KimiK25Processor
from tests.support.image_requests import write_served_model
from tests.support.odd_images import noise

PACKAGE = "mcore_rl.rollout.vision_models"


@pytest.mark.slow
def test_our_class_is_served_and_still_needed(tmp_path: Path) -> None:
    folder = write_served_model(tmp_path / "model", "kimi_k25")
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.kimi_k25_checks", str(folder)],
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert json.loads(process.stdout.splitlines()[-1]) == {
        "chosen": [f"{PACKAGE}.kimi_k25", 32, 1152],
        "keeps": False,
        "patches": f"{PACKAGE}.kimi_k25",
        "chats": f"{PACKAGE}.kimi_processor",
    }


def test_grids_have_a_frame(tmp_path: Path) -> None:
    folder = write_served_model(tmp_path / "model", "kimi_k25")
    processor = KimiK25Processor.from_pretrained(str(folder))
    made = processor([f"a{PLACEHOLDER}"], images=[noise(60, 30)])
    assert made["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert "image_grid_hws" not in made
    assert made["pixel_values"].shape == (24, 3, 14, 14)
