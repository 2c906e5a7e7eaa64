"""Pictures of shapes that are too small to see, for a policy that may look closer.

The policy sees a picture of 3 x 3 cells shrunk to two thirds, asks for a cell by the corners of a
piece, and gets it enlarged (agents/environments/crop_env.py):

    <image> what is at 1 2 ?      crop 1 2 2 3      <image>      red

Of the demonstrations for supervised fine-tuning, some guess a color instead. So the warm start has
two habits, and reinforcement learning finds which of them pays. All is made from a seed.
"""

import io
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from mcore_rl.data.rows import prompt_row, write_parquet
from mcore_rl.tasks.shapes import COLORS, EMPTY, KINDS, SIDE, Cell, draw, encoded
from mcore_rl.tasks.tiny_vision_model import write_tiny_vision_model

NUM_ZOOM_TRAIN = 1000
NUM_ZOOM_HELD_OUT = 128
NUM_ZOOM_DEMONSTRATIONS = 2000
ZOOM_GUESSES = 0.5
"""Share of the demonstrations that guess."""
VIEW = 56
"""Pixels along each side of a picture as it is first seen, and of an enlarged piece."""
TOOL = "<|tool|>"
ZOOM_CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ {'user': '<|user|> ', 'tool': '<|tool|> '}.get(m['role'], '<|assistant|> ') }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ ' <|end|> ' if m['role'] == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class ZoomProblem:
    """A picture, and the cell that is asked about.

    picture   PNG, as large as it was drawn
    column    of the cell; with `row` from 0 on, from the upper left corner
    answer    the cell's color
    """

    picture: bytes
    column: int
    row: int
    answer: str

    @property
    def question(self) -> str:
        return f"<image> what is at {self.column} {self.row} ?"

    @property
    def call(self) -> str:
        return f"crop {self.column} {self.row} {self.column + 1} {self.row + 1}"


def prepare_zoom(out_dir: Path, seed: int = 0) -> None:
    """Write {train,heldout,sft}.parquet and model/ to `out_dir`."""
    rng = random.Random(seed)
    held_out = [make_zoom_problem(rng) for _ in range(NUM_ZOOM_HELD_OUT)]
    train = [make_zoom_problem(rng) for _ in range(NUM_ZOOM_TRAIN)]
    shown = [make_zoom_problem(rng) for _ in range(NUM_ZOOM_DEMONSTRATIONS)]
    for name, problems in (("train", train), ("heldout", held_out)):
        rows = [
            {
                **prompt_row(problem.question, problem.answer, "zoom", name, i),
                "images": [{"bytes": problem.picture}],
            }
            for i, problem in enumerate(problems)
        ]
        write_parquet(rows, out_dir / f"{name}.parquet")
    rows = [row for problem in shown for row in demonstrate_zoom(problem, rng)]
    write_parquet(rows, out_dir / "sft.parquet")
    write_tiny_vision_model(out_dir / "model", zoom_vocabulary(), ZOOM_CHAT_TEMPLATE, (TOOL,))
    print(
        f"{len(train)} training and {len(held_out)} held-out prompts,"
        f" {len(rows)} demonstrations of turns in {out_dir}"
    )


def make_zoom_problem(rng: random.Random) -> ZoomProblem:
    """Return a random picture and a cell of it that is not empty."""
    place = rng.randrange(SIDE**2)
    color = rng.choice(list(COLORS))
    cells = [_choose_cell(rng) for _ in range(SIDE**2)]
    cells[place] = (color, rng.choice(KINDS))
    picture = encoded(draw(cells, rng))
    return ZoomProblem(picture, place % SIDE, place // SIDE, color)


def demonstrate_zoom(problem: ZoomProblem, rng: random.Random) -> list[dict[str, Any]]:
    """Return a row for each turn, which ends with that turn's answer."""
    whole = Image.open(io.BytesIO(problem.picture))
    question = {"role": "user", "content": problem.question}
    view = {"bytes": _enlarge(whole)}
    if rng.random() < ZOOM_GUESSES:
        guess = {"role": "assistant", "content": rng.choice(list(COLORS))}
        return [{"messages": [question, guess], "images": [view]}]
    call = {"role": "assistant", "content": problem.call}
    side = whole.width // SIDE
    left, upper = problem.column * side, problem.row * side
    piece = _enlarge(whole.crop((left, upper, left + side, upper + side)))
    told = {"role": "tool", "content": "<image>"}
    answer = {"role": "assistant", "content": problem.answer}
    return [
        {"messages": [question, call], "images": [view]},
        {"messages": [question, call, told, answer], "images": [view, {"bytes": piece}]},
    ]


def zoom_vocabulary() -> list[str]:
    """Return the words of questions, calls and answers, and of what a bad call is told."""
    numbers = [str(number) for number in range(SIDE + 1)]
    words = {"what", "is", "at", "?", "crop", *COLORS}
    words |= {"no", "piece", ":", "to", ",", "the", "first", "corner", "before", "last"}
    return [*numbers, *sorted(words)]


def _enlarge(picture: Image.Image) -> bytes:
    return encoded(picture.resize((VIEW, VIEW), Image.Resampling.BICUBIC))


def _choose_cell(rng: random.Random) -> Cell:
    if rng.random() < EMPTY:
        return None
    return rng.choice(list(COLORS)), rng.choice(KINDS)
