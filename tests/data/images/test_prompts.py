"""Rows with images become ids and patches that agree; unusable rows are refused or counted."""

import random
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.data.images.encoded import BadImageError
from mcore_rl.data.images.processor import ImageProcessor
from mcore_rl.data.images.prompts import ImagePrompt, ImagePrompts, ImageRules
from mcore_rl.data.rows import load_rows, write_parquet
from mcore_rl.types import Patches
from tests.support.odd_images import (
    PLACEHOLDER,
    bad_images,
    encode,
    good_images,
    make_vision_tokenizer,
    noise,
    write_processor,
)

TOKENIZER = make_vision_tokenizer()
PLACEHOLDER_ID = TOKENIZER.convert_tokens_to_ids(PLACEHOLDER)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_processor(tmp_path / "model")


def encode_messages(messages: list[dict[str, Any]]) -> list[int]:
    return TOKENIZER.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )


def make_prompts(folder: Path, **rules: Any) -> ImagePrompts:
    settings = {"max_prompt_len": 200, "max_pixels": 1 << 20, **rules}
    return ImagePrompts(
        ImageProcessor(folder), encode_messages, PLACEHOLDER_ID, ImageRules(**settings)
    )


def row_of(content: str, *images: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": content}], "images": list(images)}


def patches_of(prompt: ImagePrompt, folder: Path) -> list[Patches]:
    return [ImageProcessor(folder).patches_of(image) for image in prompt.images]


def check(prompt: ImagePrompt, folder: Path) -> None:
    """Each placeholder run has as many tokens as its image's patches fill."""
    num_placeholders = prompt.token_ids.count(PLACEHOLDER_ID)
    patches = patches_of(prompt, folder)
    assert num_placeholders == sum(len(each.pixels_PD) // 4 for each in patches)


def test_ids_are_those_of_the_expanded_text(folder: Path) -> None:
    row = row_of("<image> or <image>?", encode(noise(40, 30)), encode(noise(8, 64)))
    prompt = make_prompts(folder).prompt("row 0", row, folder)
    assert prompt is not None
    text = TOKENIZER.decode(encode_messages([{"role": "user", "content": "@ or @?"}]))
    for patches in patches_of(prompt, folder):
        pads = PLACEHOLDER * (len(patches.pixels_PD) // 4)
        text = text.replace("@", f"<|vision_start|>{pads}<|vision_end|>", 1)
    assert list(prompt.token_ids) == TOKENIZER(text)["input_ids"]
    check(prompt, folder)


def test_text_alone_needs_no_images(folder: Path) -> None:
    prompt = make_prompts(folder).prompt("row 0", row_of("2 + 2 ?"), folder)
    assert prompt is not None
    assert prompt.images == ()


def test_overlong_prompts_are_dropped_shrunk_or_refused(folder: Path) -> None:
    row = row_of("<image><image>", encode(noise(200, 300)), encode(noise(16, 16)))
    whole = make_prompts(folder).prompt("row 0", row, folder)
    assert whole is not None
    limit = len(whole.token_ids) - 10
    filtering = make_prompts(folder, max_prompt_len=limit)
    assert filtering.prompt("row 0", row, folder) is None
    assert filtering.left_out == {"overlong": 1}
    shrunk = make_prompts(folder, max_prompt_len=limit, overlong="shrink")
    smaller = shrunk.prompt("row 0", row, folder)
    assert smaller is not None
    check(smaller, folder)
    assert limit - 10 <= len(smaller.token_ids) <= limit
    assert patches_of(smaller, folder)[1].grid == patches_of(whole, folder)[1].grid
    assert (
        make_prompts(folder, max_prompt_len=8, overlong="shrink").prompt("row 0", row, folder)
        is None
    )
    with pytest.raises(ValueError, match=f"row 0: its prompt has {limit + 10} tokens with 2"):
        make_prompts(folder, max_prompt_len=limit, overlong="error").prompt("row 0", row, folder)


def test_a_placeholder_of_the_model_in_the_text_is_refused(folder: Path) -> None:
    row = row_of(f"<image> {PLACEHOLDER}", encode(noise(8, 8)))
    with pytest.raises(
        BadImageError,
        match="row 0 has 1 images and pieces of videos, but its rendered prompt has 2",
    ):
        make_prompts(folder).prompt("row 0", row, folder)


def test_a_limit_of_tokens_shrinks_each_image(folder: Path) -> None:
    row = row_of("<image><image>", encode(noise(200, 300)), encode(noise(16, 16)))
    prompt = make_prompts(folder, max_tokens=12).prompt("row 0", row, folder)
    assert prompt is not None
    check(prompt, folder)
    assert [image.num_tokens <= 12 for image in prompt.images] == [True, True]
    whole = make_prompts(folder).prompt("row 0", row, folder)
    assert whole is not None and whole.images[0].num_tokens > 12
    assert whole.images[0].digest != prompt.images[0].digest


def test_damage_behind_the_header_is_found_only_if_images_are_verified(folder: Path) -> None:
    row = row_of("<image>", bad_images()["truncated"])
    with pytest.raises(BadImageError, match="row 0, image 0 is damaged"):
        make_prompts(folder).prompt("row 0", row, folder)
    assert make_prompts(folder, verify=False).prompt("row 0", row, folder) is not None


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="overlong='cut'"):
        ImageRules(max_prompt_len=1, overlong="cut")


def test_two_hundred_rows_of_any_kind(folder: Path, tmp_path: Path) -> None:
    """Every row is made whole or counted, and each failure names its file and row."""
    rows, is_bad = random_rows(200, tmp_path)
    write_parquet(rows, tmp_path / "rows.parquet")
    loaded = list(load_rows([str(tmp_path / "rows.parquet")]))
    skipping = make_prompts(folder, bad="skip", overlong="shrink", max_prompt_len=90)
    made = [prompt.where for prompt in skipping.prompts(loaded, tmp_path)]
    assert skipping.left_out["bad"] == sum(is_bad)
    assert skipping.left_out["bad"] + skipping.left_out["overlong"] + len(made) == 200
    assert len(made) > 50
    strict = make_prompts(folder)
    for (where, row), bad in zip(loaded, is_bad, strict=True):
        if bad:
            with pytest.raises(BadImageError, match=rf"rows\.parquet {where.partition(' ')[2]}\b"):
                strict.prompt(where, row, tmp_path)
        else:
            prompt = strict.prompt(where, row, tmp_path)
            assert prompt is None or check(prompt, folder) is None


def random_rows(num_rows: int, folder: Path) -> tuple[list[dict[str, Any]], list[bool]]:
    """Return rows of 0 to 3 images in one or two turns, and which of them cannot be used."""
    chance = random.Random(7)
    good, bad = list(good_images().values()), list(bad_images().values())
    rows, is_bad = [], []
    for number in range(num_rows):
        images = [chance.choice(good) for _ in range(chance.randrange(4))]
        spoiled = bool(images) and chance.random() < 0.3
        if spoiled:
            images[chance.randrange(len(images))] = chance.choice(bad)
        marks = len(images)
        if chance.random() < 0.1:
            marks += chance.choice((-1, 1)) if marks else 1
        entries = [entry_of(image, folder / f"{number}-{i}") for i, image in enumerate(images)]
        contents = ["<image> " * (marks // 2) + "first", "then " + "<image>" * (marks - marks // 2)]
        prompt = [{"role": "user", "content": content} for content in contents]
        rows.append({"prompt": prompt, "images": entries})
        is_bad.append(spoiled or marks != len(images))
    return rows, is_bad


def entry_of(image: bytes, path: Path) -> dict[str, Any]:
    """Return the image inside the row, or as a file for every third."""
    if len(image) % 3:
        return {"bytes": image, "path": None}
    path.write_bytes(image)
    return {"bytes": None, "path": path.name}
