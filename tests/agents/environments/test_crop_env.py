"""A policy gets the pieces that it asks for, enlarged from the large picture."""

import io
from typing import Any

import pytest
from PIL import Image

from mcore_rl.agents.environments.crop_env import CropEnvironment, CropOptions
from mcore_rl.agents.environments.environment import Message, Start, find_images, make_image_part

COLORS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]
"""The colors of the quarters of the picture, row by row."""


def picture() -> bytes:
    image = Image.new("RGB", (200, 100))
    for number, color in enumerate(COLORS):
        x, y = number % 2 * 100, number // 2 * 50
        image.paste(color, (x, y, x + 100, y + 50))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def begin(**options: Any) -> tuple[CropEnvironment, Start]:
    environment = CropEnvironment(CropOptions(view_pixels=40, zoom_pixels=60, units=2, **options))
    content = [make_image_part(picture()), {"type": "text", "text": "what is there ?"}]
    task = {"messages": [{"role": "user", "content": content}], "ground_truth": "Red"}
    return environment, environment.reset(task)


def shown(*messages: Message) -> Image.Image:
    [data] = find_images(messages)
    return Image.open(io.BytesIO(data))


def answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def test_the_first_view_is_small() -> None:
    _, start = begin()
    assert shown(*start.messages).size == (40, 20)
    assert start.messages[0]["content"][1] == {"type": "text", "text": "what is there ?"}


@pytest.mark.parametrize(
    ("call", "size", "color"),
    [
        ("crop(0,0,1,1)", (60, 30), COLORS[0]),
        ("crop 1 0 2 1", (60, 30), COLORS[1]),
        ("I look: crop(0, 1, 1, 2).", (60, 30), COLORS[2]),
        ("crop [1, 1, 2, 2]", (60, 30), COLORS[3]),
    ],
)
def test_pieces_are_those_that_were_asked_for(
    call: str, size: tuple[int, int], color: tuple[int, ...]
) -> None:
    environment, _ = begin()
    step = environment.step(answer(call))
    [message] = step.messages
    assert message["role"] == "tool" and not step.done and step.metrics == {"crops": 1.0}
    piece = shown(message)
    assert piece.size == size and piece.getcolors() == [(size[0] * size[1], color)]


@pytest.mark.parametrize("call", ["crop(1,0,1,1)", "crop(0,0,3,1)", "crop 1 1 0 0"])
def test_pieces_that_are_none_are_told(call: str) -> None:
    environment, _ = begin(role="user")
    step = environment.step(answer(call))
    assert step.messages == [
        {"role": "user", "content": "no piece : 0 to 2 , the first corner before the last"}
    ]


@pytest.mark.parametrize(
    ("text", "reward"), [("it is red", 1.0), ("Red.", 1.0), ("blue", 0.0), ("", 0.0)]
)
def test_the_last_word_is_the_answer(text: str, reward: float) -> None:
    environment, _ = begin()
    environment.step(answer("crop(0,0,1,1)"))
    step = environment.step(answer(text))
    assert step.done and step.reward == reward and step.metrics == {"crops": 1.0}


def test_too_many_calls_end_the_episode() -> None:
    environment, _ = begin(max_crops=1)
    assert not environment.step(answer("crop(0,0,1,1)")).done
    step = environment.step(answer("crop(0,0,1,1) red"))
    assert step.done and step.reward == 0.0
    environment.close()


def test_a_prompt_needs_a_picture() -> None:
    environment = CropEnvironment(CropOptions())
    task = {"messages": [{"role": "user", "content": "hello"}], "ground_truth": ""}
    with pytest.raises(ValueError, match="no picture to crop"):
        environment.reset(task)


@pytest.mark.parametrize("options", [{"units": 0}, {"view_pixels": 0}, {"role": "system"}])
def test_options_without_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(options)))):
        CropOptions(**options)
