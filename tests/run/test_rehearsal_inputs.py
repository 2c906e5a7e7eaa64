"""The rehearsal of a model that sees images has a tower, sections and tokens of its own sizes."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mcore_rl.config import ParallelConfig
from mcore_rl.data.images.processor import ImageProcessor
from mcore_rl.run.rehearsal import tiny_config
from mcore_rl.run.rehearsal_inputs import nest_text_config, tiny_head, write_inputs
from mcore_rl.weights.hf.config import read_hf_config, with_text_settings
from mcore_rl.weights.layouts.sglang_models import SGLangSizes, refuse_unserved
from mcore_rl.weights.models import family_of, hf_tensor_shapes, refuse_unsupported
from mcore_rl.weights.models.recipe_checks import check_layout
from mcore_rl.weights.models.settings import read_rope

SECTIONED = ("qwen2_5_vl_7b", "glm_4_5v", "qwen3_5_35b_a3b")
MODELS = {
    "qwen2_5_vl_7b": "image_token_id",
    "glm_4_5v": "image_token_id",
    "kimi_vl_a3b": "media_placeholder_token_id",
    "kimi_k25": "media_placeholder_token_id",
    "qwen3_5_35b_a3b": "image_token_id",
}
"""Model -> the key of config.json that names its placeholder."""
QUICK = ("qwen2_5_vl_7b", "kimi_vl_a3b")
"""Models whose inputs `make test` makes."""
WORDS = ["<|pad|>", "<|end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]


@pytest.mark.parametrize("name", SECTIONED)
def test_sections_are_those_of_a_small_head(name: str) -> None:
    large = read_hf_config(f"recipes/model/{name}")
    tiny = tiny_config(large, 2)
    section = read_rope(tiny)["mrope_section"]
    rotated = tiny_head(tiny) * family_of(tiny).rotary_share(tiny)
    assert min(section) >= 1 and sum(section) == rotated // 2
    made = nest_text_config(tiny, WORDS)
    assert made["video_token_id"] == 0
    starts = [made[key] for key in made if key.endswith("_start_token_id") and "video" not in key]
    assert starts == [2]


@pytest.mark.parametrize("name", MODELS)
def test_towers_are_small_and_of_the_same_kind(name: str) -> None:
    large = read_hf_config(f"recipes/model/{name}")
    made = with_text_settings(nest_text_config(tiny_config(large, 2), WORDS))
    refuse_unsupported(made)
    assert family_of(made) is family_of(large)
    assert family_of(made).sizes(made)["tower_blocks"] == 2
    assert made["vision_config"].keys() <= {*large["vision_config"], "initializer_range"}
    assert made[MODELS[name]] == 4
    assert {_pattern(n) for n in hf_tensor_shapes(made)} == {
        _pattern(n) for n in hf_tensor_shapes(large)
    }


def _pattern(name: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MODELS],
)
def test_inputs_are_questions_about_pictures(name: str, tmp_path: Path) -> None:
    tiny = tiny_config(read_hf_config(f"recipes/model/{name}"), 2)
    write_inputs(tiny, tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert len(pq.read_table(tmp_path / "train.parquet").to_pylist()[0]["images"]) == 1
    processor = ImageProcessor(tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "preprocessor_config.json").read_text())
    patch = settings.get("media_proc_cfg", settings)["patch_size"]
    assert patch == config["vision_config"]["patch_size"]
    assert processor.pixels_per_token == (2 * patch) ** 2
    assert processor.most_tokens == 64
    vocabulary = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    assert config["text_config"]["vocab_size"] == len(vocabulary)
    assert config[MODELS[name]] == vocabulary["<|image_pad|>"]


def test_a_small_kimi_vl_is_trained_and_served_in_parallel(tmp_path: Path) -> None:
    write_inputs(tiny_config(read_hf_config("recipes/model/kimi_vl_a3b"), 3), tmp_path)
    config = read_hf_config(tmp_path / "model")
    assert config["num_hidden_layers"] == 3
    check_layout(config, ParallelConfig(tp=2, ep=2))
    refuse_unserved(config, SGLangSizes(tp=2, ep=2))
