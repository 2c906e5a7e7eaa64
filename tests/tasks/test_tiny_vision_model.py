"""The tiny model is one that the families' table knows, and its parts fit one another."""

from pathlib import Path
from typing import Any

from mcore_rl.data.images.decode import ImageSize
from mcore_rl.data.images.processor import ImageProcessor
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.tasks.tiny_models import PLACEHOLDER, write_tiny_vision_model
from mcore_rl.weights.hf.config import ModelFacts


def test_a_picture_takes_a_token_per_cell(tmp_path: Path) -> None:
    write_tiny_vision_model(tmp_path, ["how", "many", "?", "3"])
    policy = ModelFacts.read(tmp_path)
    assert policy.family.has_tower
    tokenizer = load_tokenizer(tmp_path, "model.path")
    assert policy.vocab_size == len(tokenizer)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " how"}]}]
    ids: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    words = tokenizer.convert_ids_to_tokens(ids)
    assert words == [
        *("<|user|>", "<|vision_start|>", PLACEHOLDER, "<|vision_end|>", "how"),
        "<|assistant|>",
    ]
    assert ids[2] == policy.config["image_token_id"]
    assert ImageProcessor(tmp_path).num_tokens(ImageSize(84, 84)) == 9
