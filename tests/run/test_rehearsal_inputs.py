"""The rehearsal of a model that sees images has a tower, sections and tokens of its own sizes."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mcore_rl.data.images.processor import ImageProcessor
from mcore_rl.run.rehearsal import tiny_config
from mcore_rl.run.rehearsal_inputs import nested_config, tiny_head, write_inputs
from mcore_rl.slices.families import family_of, hf_tensor_shapes, refuse_unsupported
from mcore_rl.slices.families.settings import rope_of
from mcore_rl.slices.hf.config import read_hf_config
from mcore_rl.slices.hf.nested import with_text_settings

MODELS = ("qwen2_5_vl_7b", "glm_4_5v")


@pytest.mark.parametrize("name", MODELS)
def test_heads_and_towers_are_small_and_of_the_same_kind(name: str) -> None:
    large = read_hf_config(f"recipes/model/{name}")
    tiny = tiny_config(large, 2)
    section = rope_of(tiny)["mrope_section"]
    rotated = tiny_head(tiny) * family_of(tiny).rotary_share(tiny)
    assert min(section) >= 1 and sum(section) == rotated // 2
    words = ["<|pad|>", "<|end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    made = with_text_settings(nested_config(tiny, words))
    refuse_unsupported(made)
    assert family_of(made) is family_of(large)
    assert made["vision_config"]["depth"] == 2
    assert made["image_token_id"] == 4 and made["video_token_id"] == 0
    starts = [made[key] for key in made if key.endswith("_start_token_id") and "video" not in key]
    assert starts == [2]
    assert {_pattern(n) for n in hf_tensor_shapes(made)} == {
        _pattern(n) for n in hf_tensor_shapes(large)
    }


def _pattern(name: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


@pytest.mark.parametrize("name", MODELS)
def test_inputs_are_questions_about_pictures(name: str, tmp_path: Path) -> None:
    tiny = tiny_config(read_hf_config(f"recipes/model/{name}"), 2)
    write_inputs(tiny, tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert len(pq.read_table(tmp_path / "train.parquet").to_pylist()[0]["images"]) == 1
    processor = ImageProcessor(tmp_path / "model")
    assert processor.pixels_per_token == 28 * 28
    vocabulary = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    assert config["text_config"]["vocab_size"] == len(vocabulary)
    assert config["image_token_id"] == vocabulary["<|image_pad|>"]
