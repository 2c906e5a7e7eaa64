"""Lets a policy look closer: it sees a small picture, and asks for pieces of the large one.

picture --shrunk--> policy --crop(x0,y0,x1,y1)--> piece, enlarged --> policy --> answer
                      ^                              |
                      +------------------------------+
"""

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcore_rl.agents.environments.environment import (
    Message,
    Start,
    Step,
    join_texts,
    make_image_part,
    read_image_bytes,
)

if TYPE_CHECKING:  # its interpreter may lack Pillow until an episode runs
    from PIL import Image

CALL = re.compile(r"\bcrop\b\W*(\d+)\W+(\d+)\W+(\d+)\W+(\d+)")


@dataclass(frozen=True)
class CropOptions:
    """How pictures are shown and answers rewarded: 1 if the last word is the ground truth.

    view_pixels   longest side of a prompt's pictures as the policy first sees them
    zoom_pixels   longest side of a piece that it asks for
    units         coordinates run from 0 to this along each side, from the upper left corner
    max_crops     calls in an episode; a further one ends it without reward
    role          role of the message with a piece, for templates without messages of tools
    """

    view_pixels: int = 448
    zoom_pixels: int = 448
    units: int = 1000
    max_crops: int = 4
    role: str = "tool"

    def __post_init__(self) -> None:
        for name in ("view_pixels", "zoom_pixels", "units", "max_crops"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: at least 1")
        if self.role not in ("tool", "user"):
            raise ValueError(f"role is {self.role!r}: tool or user")


@dataclass
class CropEnvironment:
    """One episode: a question about a picture; crops are taken from the prompt's last one."""

    options: CropOptions
    _picture: "Image.Image | None" = None
    _truth: str = ""
    _num_crops: int = 0

    def reset(self, task: Mapping[str, Any]) -> Start:
        """Show the prompt with small pictures. Raises ValueError if it has none."""
        self._truth = str(task["ground_truth"]).strip().lower()
        messages = [self._shrink(message) for message in task["messages"]]
        if self._picture is None:
            raise ValueError("the prompt has no picture to crop: give the row `images` (vision.md)")
        return Start(messages)

    def step(self, message: Message) -> Step:
        """Show the piece that an answer asks for, or end with the answer."""
        text = join_texts(message)
        call = CALL.search(text)
        if call is None:
            words = text.lower().split()
            is_right = bool(words) and words[-1].strip(".") == self._truth
            return self._step(reward=float(is_right), done=True)
        if self._num_crops >= self.options.max_crops:
            return self._step(done=True)
        self._num_crops += 1
        return self._step([self._tell(call)])

    def close(self) -> None:
        self._picture = None

    def _step(self, messages: list[Message] | None = None, **outcome: Any) -> Step:
        return Step(messages or [], metrics={"crops": float(self._num_crops)}, **outcome)

    def _tell(self, call: re.Match[str]) -> Message:
        x0, y0, x1, y1 = (int(number) for number in call.groups())
        units = self.options.units
        role = {"role": self.options.role}
        if not (x0 < x1 <= units and y0 < y1 <= units):
            return {
                **role,
                "content": f"no piece : 0 to {units} , the first corner before the last",
            }
        assert self._picture is not None, "reset comes first"
        width, height = self._picture.size
        box = (x0 * width / units, y0 * height / units, x1 * width / units, y1 * height / units)
        left, upper, right, lower = map(round, box)
        piece = self._picture.crop((left, upper, max(right, left + 1), max(lower, upper + 1)))
        return {**role, "content": [_part(_scale(piece, self.options.zoom_pixels))]}

    def _shrink(self, message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        return {**message, "content": [self._shrink_part(part) for part in content]}

    def _shrink_part(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        from PIL import Image

        if part.get("type") != "image_url":
            return part
        self._picture = Image.open(io.BytesIO(read_image_bytes(part))).convert("RGB")
        longest = min(self.options.view_pixels, max(self._picture.size))
        return _part(_scale(self._picture, longest))


def _scale(picture: "Image.Image", longest: int) -> "Image.Image":
    """Return a picture whose longest side has `longest` pixels."""
    from PIL import Image

    factor = longest / max(picture.size)
    width, height = (max(1, round(side * factor)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.BICUBIC)


def _part(picture: "Image.Image") -> dict[str, Any]:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return make_image_part(out.getvalue())
