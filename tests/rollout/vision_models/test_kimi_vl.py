"""SGLang serves Kimi-VL by our class, as long as its own has another activation and keeps copies.

Once its own class passes, ours is not needed anymore.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mcore_rl.data.images.encoded import EncodedImage
from mcore_rl.data.images.processor import ImageProcessor
from mcore_rl.rollout.vision_models.kimi_processor import PLACEHOLDER, KimiVlProcessor
from tests.support.image_requests import write_served_model
from tests.support.odd_images import encode, noise

MODULE = "mcore_rl.rollout.vision_models.kimi_vl"


@pytest.mark.slow
def test_our_class_is_served_and_still_needed(tmp_path: Path) -> None:
    folder = write_served_model(tmp_path / "model", "kimi_vl")
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.kimi_vl_checks", str(folder)],
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert json.loads(process.stdout.splitlines()[-1]) == {
        "module": MODULE,
        "activation": "GELU",
        "upstream_activation": "QuickGELU",
        "kept": {
            "chosen_loaded": [],
            "chosen_in_place": [],
            "upstream_loaded": ["positions"],
            "upstream_in_place": ["positions", "latent"],
        },
        "processor": "mcore_rl.rollout.vision_models.kimi_processor",
    }


def test_patches_and_placeholders_are_those_of_the_trainer(tmp_path: Path) -> None:
    folder = write_served_model(tmp_path / "model", "kimi_vl")
    processor = KimiVlProcessor.from_pretrained(str(folder))
    pictures = [noise(60, 30), noise(28, 28)]
    made = processor([f"a{PLACEHOLDER}b{PLACEHOLDER}"], images=pictures, padding=True)
    placeholder_id = processor.tokenizer.convert_tokens_to_ids(PLACEHOLDER)
    is_image = [token == placeholder_id for token in made["input_ids"][0].tolist()]
    assert is_image == [False, *[True] * 6, False, True]
    assert made["image_grid_hws"].tolist() == [[4, 6], [2, 2]]
    trainer = ImageProcessor(folder)
    wanted = [trainer.patches(EncodedImage(encode(each), "")).pixels_PD for each in pictures]
    assert torch.equal(made["pixel_values"].flatten(1), torch.cat(wanted))
    assert made["pixel_values"].shape == (28, 3, 14, 14)


def test_text_alone_has_no_pixels(tmp_path: Path) -> None:
    processor = KimiVlProcessor.from_pretrained(
        str(write_served_model(tmp_path / "model", "kimi_vl"))
    )
    assert set(processor(["a"])) == {"input_ids"}
    with pytest.raises(ValueError, match="1 images for 0"):
        processor(["a"], images=[noise(28, 28)])
