"""Conversations with images become batches with patches, and the loss on the answer alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.data.images.processor import ImageProcessor
from mcore_rl.data.images.prompts import ImagePrompts, ImageRules
from mcore_rl.data.rows import write_parquet
from mcore_rl.data.sft import MESSAGES, SftImages, SftStream
from tests.support.odd_images import (
    PLACEHOLDER,
    encode,
    make_vision_tokenizer,
    noise,
    write_processor,
)

TOKENIZER = make_vision_tokenizer()
PLACEHOLDER_ID = TOKENIZER.convert_tokens_to_ids(PLACEHOLDER)


def encode_messages(messages: list[dict[str, Any]], generation_prompt: bool) -> list[int]:
    return TOKENIZER.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=generation_prompt, return_dict=False
    )


def make_images(folder: Path, max_len: int = 200, bad: str = "error") -> SftImages:
    processor = ImageProcessor(write_processor(folder / "model"))
    prompts = ImagePrompts(
        processor,
        lambda messages: encode_messages(messages, True),
        PLACEHOLDER_ID,
        ImageRules(max_len, bad=bad),
        MESSAGES,
    )
    return SftImages(prompts, encode_messages, processor.patches_of)


def write_rows(folder: Path, *rows: tuple[str, str, list[bytes]]) -> list[str]:
    made = [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ],
            "images": [{"bytes": image} for image in images],
        }
        for question, answer, images in rows
    ]
    write_parquet(made, folder / "sft.parquet")
    return [str(folder / "sft.parquet")]


def test_a_conversation_with_a_video_has_its_answer_behind_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3_vl"}')
    messages = [
        {"role": "user", "content": "<video>?"},
        {"role": "assistant", "content": "three"},
    ]
    frames = [encode(noise(40, 30, seed=seed)) for seed in range(3)]
    write_parquet([{"messages": messages, "videos": [frames]}], tmp_path / "sft.parquet")
    [(ids, prompt_len, images)] = make_images(tmp_path).read([str(tmp_path / "sft.parquet")])
    assert TOKENIZER.decode(ids[prompt_len:]) == "three"
    assert [len(image.clip.frames) for image in images if image.clip] == [1, 0]
    assert ids.count(PLACEHOLDER_ID) == sum(image.num_tokens for image in images)


def test_patches_lie_at_their_sequences(tmp_path: Path) -> None:
    pictures = [encode(noise(40, 30, seed=seed)) for seed in range(3)]
    files = write_rows(
        tmp_path,
        ("<image> or <image>?", "two", [pictures[0], pictures[1]]),
        ("2 + 2", "four", []),
        ("<image>", "one", [pictures[2]]),
    )
    images = make_images(tmp_path)
    stream = SftStream(files, TOKENIZER, 200, seed=0, images=images)
    batch = stream.next_batch(3)
    assert batch.images is not None
    assert sorted(batch.images.nums_N) == [0, 1, 2]
    lens_N = list(batch.lens_N)
    nums_N = list(batch.images.nums_N)
    num_tokens = [int((own == PLACEHOLDER_ID).sum()) for own in batch.token_ids_T.split(lens_N)]
    nums_patches = [int(own.prod(-1).sum()) for own in batch.images.grids_I3.split(nums_N)]
    assert nums_patches == [4 * num for num in num_tokens]
    trained = TOKENIZER.decode(batch.token_ids_T[batch.loss_mask_T])
    assert sorted(trained) == sorted("twofourone")


def test_conversations_that_are_left_out_are_counted(tmp_path: Path, caplog) -> None:
    large = ("<image>", "one", [encode(noise(160, 160))])
    broken = ("<image>", "one", [b"no image"])
    long = ("2 + 2", "four" * 10, [])
    files = write_rows(tmp_path, large, broken, ("2 + 2", "four", []), broken, long)
    images = make_images(tmp_path, max_len=30, bad="skip")
    with caplog.at_level("INFO"):
        SftStream(files, TOKENIZER, 30, seed=0, images=images)
    told = "1 conversations, 2 of more than 30 tokens and 2 with bad images dropped"
    assert told in caplog.text
    images = make_images(tmp_path, max_len=30, bad="skip")
    files = write_rows(tmp_path, large, broken, broken)
    with pytest.raises(ValueError, match="left: 1 have more, 2 have images that cannot be used"):
        SftStream(files, TOKENIZER, 30, seed=0, images=images)


def test_a_conversation_of_text_equals_that_of_a_text_model(tmp_path: Path) -> None:
    files = write_rows(tmp_path, ("2 + 2", "four", []))
    seen = SftStream(files, TOKENIZER, 200, seed=0, images=make_images(tmp_path)).next_batch(1)
    plain = SftStream(files, TOKENIZER, 200, seed=0).next_batch(1)
    assert seen.images is None
    assert torch.equal(seen.token_ids_T, plain.token_ids_T)
    assert torch.equal(seen.loss_mask_T, plain.loss_mask_T)


def test_a_model_of_text_refuses_images(tmp_path: Path) -> None:
    files = write_rows(tmp_path, ("<image>", "one", [encode(noise(8, 8))]))
    with pytest.raises(ValueError, match=r"sft.parquet row 0 has 1 `images`, but they are not"):
        SftStream(files, TOKENIZER, 200, seed=0)


def test_a_conversation_must_end_with_an_answer(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "<image>"}], "images": [b"x"]}]
    write_parquet(rows, tmp_path / "sft.parquet")
    with pytest.raises(ValueError, match=r"row 0: `messages` must end with .*'assistant'"):
        make_images(tmp_path).read([str(tmp_path / "sft.parquet")])


def test_a_template_that_hides_the_answer_is_refused(tmp_path: Path) -> None:
    files = write_rows(tmp_path, ("<image>", "one", [encode(noise(8, 8))]))
    images = make_images(tmp_path)
    images._encode = lambda messages, generation_prompt: [PLACEHOLDER_ID, int(generation_prompt)]
    with pytest.raises(ValueError, match=r"row 0: .*the loss mask cannot be placed"):
        images.read(files)
