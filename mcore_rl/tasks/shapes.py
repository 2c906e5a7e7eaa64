"""Pictures of colored shapes with questions that only the picture answers, for a laptop CPU.

A picture has 3 x 3 cells, each empty or with a ring, a disk or a square in one of three colors:

    <image> how many red ?          no yes no no no yes no no no so 2
    <image> more red or blue ?      red no blue red no no blue no red so red

The answers go through the cells, so a response has 12 tokens. Half of the demonstrations for
supervised fine-tuning describe a picture, which teaches to see. The others answer questions, 60 %
of them with one of two bad habits: they end with one too many, or with the color that the question
names first. So the warm start has good and bad habits, and reinforcement learning finds which of
them pays.

`heldout_blind` has the questions of `heldout` with blank pictures: a policy that does not look does
no better than the best constant answer.

In the zoom task the policy sees a picture shrunk to two thirds, in which shapes are too small to
see. It asks for a cell by its corners, and gets it enlarged (agents/environments/crop_env.py):

    <image> what is at 1 2 ?      crop 1 2 2 3      <image>      red

Some of its demonstrations guess a color instead. Everything is made from a seed.
"""

import io
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from mcore_rl.data.rows import prompt_row, write_parquet
from mcore_rl.tasks.tiny_models import write_tiny_vision_model

NUM_TRAIN = 2000
NUM_HELD_OUT = 256
NUM_DEMONSTRATIONS = 3000
SIDE = 3
"""Cells along each side of a picture."""
CELL = 28
"""Pixels along each side of a cell: what becomes one token."""
EMPTY = 0.25
"""Share of the cells without a shape."""
COUNTS = 0.75
"""Share of the questions that ask for a number."""
DESCRIBES = 0.5
"""Share of the demonstrations that describe a picture."""
BAD_HABIT = 0.6
"""Share of the demonstrations that answer a question with a bad habit."""
GRAY = (122, 116, 104)
"""The background: what processors of Qwen2.5-VL subtract, so that an empty cell is nearly zero."""
COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}
KINDS = ("ring", "disk", "square")
DESCRIPTION = "what is there ?"
Cell = tuple[str, str] | None
"""(color, kind); None: empty."""
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
class PictureProblem:
    """A picture with a question about it.

    picture      PNG
    cells        a word for what each cell shows
    right        the words of an answer for each cell, and the answer
    habit        those of somebody with the bad habits
    """

    picture: bytes
    cells: tuple[str, ...]
    question: str
    right: tuple[str, ...]
    habit: tuple[str, ...]

    @property
    def answer(self) -> str:
        return self.right[-1]


def prepare_shapes(out_dir: Path, seed: int = 0) -> None:
    """Write {train,heldout,heldout_blind,sft}.parquet and model/ to `out_dir`."""
    rng = random.Random(seed)
    held_out = [make_problem(rng) for _ in range(NUM_HELD_OUT)]
    train = [make_problem(rng) for _ in range(NUM_TRAIN)]
    shown = [make_problem(rng) for _ in range(NUM_DEMONSTRATIONS)]
    for name, problems in (("train", train), ("heldout", held_out)):
        write_parquet(_rows(problems, name), out_dir / f"{name}.parquet")
    blank = encode_png(draw([None] * SIDE**2, rng))
    blind = [replace(problem, picture=blank) for problem in held_out]
    write_parquet(_rows(blind, "heldout_blind"), out_dir / "heldout_blind.parquet")
    write_parquet([demonstrate(problem, rng) for problem in shown], out_dir / "sft.parquet")
    write_tiny_vision_model(out_dir / "model", vocabulary())
    print(
        f"{len(train)} training and {len(held_out)} held-out prompts, {len(shown)} demonstrations"
        f" in {out_dir}; without the picture, at best {best_blind(held_out):.1%} are right"
    )


def make_problem(rng: random.Random) -> PictureProblem:
    """Return a random picture and question."""
    cells = [_choose_cell(rng) for _ in range(SIDE**2)]
    picture = encode_png(draw(cells, rng))
    shown = tuple(map(_word, cells))
    if rng.random() < COUNTS:
        color = rng.choice(list(COLORS))
        matches = [cell is not None and cell[0] == color for cell in cells]
        right = _count_out(matches, sum(matches))
        habit = _count_out(matches, sum(matches) + 1)
        return PictureProblem(picture, shown, f"how many {color} ?", right, habit)
    one, other = rng.sample(list(COLORS), 2)
    words = [cell[0] if cell is not None and cell[0] in (one, other) else "no" for cell in cells]
    more = words.count(one) - words.count(other)
    answer = "same" if not more else one if more > 0 else other
    question = f"more {one} or {other} ?"
    return PictureProblem(picture, shown, question, (*words, "so", answer), (*words, "so", one))


def draw(cells: Sequence[Cell], rng: random.Random) -> Image.Image:
    """Return the picture of cells, row by row; shapes vary in size and place."""
    image = Image.new("RGB", (SIDE * CELL, SIDE * CELL), GRAY)
    pen = ImageDraw.Draw(image)
    for number, cell in enumerate(cells):
        if cell is None:
            continue
        row, column = divmod(number, SIDE)
        radius = rng.randint(7, 11)
        x = column * CELL + CELL // 2 + rng.randint(-2, 2)
        y = row * CELL + CELL // 2 + rng.randint(-2, 2)
        box = (x - radius, y - radius, x + radius, y + radius)
        if cell[1] == "ring":
            pen.ellipse(box, outline=COLORS[cell[0]], width=4)
        elif cell[1] == "disk":
            pen.ellipse(box, fill=COLORS[cell[0]])
        else:
            pen.rectangle(box, fill=COLORS[cell[0]])
    return image


def encode_png(image: Image.Image) -> bytes:
    """Return an image as PNG."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def demonstrate(problem: PictureProblem, rng: random.Random) -> dict[str, Any]:
    """Return a row with a conversation: a description, or an answer that may show a bad habit."""
    if rng.random() < DESCRIBES:
        question = DESCRIPTION
        words = (*problem.cells, "so", "done")
    else:
        question = problem.question
        words = problem.habit if rng.random() < BAD_HABIT else problem.right
    messages = [
        {"role": "user", "content": f"<image> {question}"},
        {"role": "assistant", "content": " ".join(words)},
    ]
    return {"messages": messages, "images": [{"bytes": problem.picture}]}


def vocabulary() -> list[str]:
    """Return the words of questions and answers."""
    numbers = [str(number) for number in range(SIDE**2 + 2)]
    words = {"how", "many", "more", "or", "?", "yes", "no", "so", "same", "done"}
    words |= {*DESCRIPTION.split(), *COLORS, _word(None)}
    return [*numbers, *sorted(words)]


def best_blind(problems: Sequence[PictureProblem]) -> float:
    """Return the share that is right if each kind of question always gets its best answer."""
    answers = {kind: Counter[str]() for kind in ("how", "more")}
    for problem in problems:
        answers[problem.question.split()[0]][problem.answer] += 1
    best = sum(max(counter.values(), default=0) for counter in answers.values())
    return best / len(problems)


def _choose_cell(rng: random.Random) -> Cell:
    if rng.random() < EMPTY:
        return None
    return rng.choice(list(COLORS)), rng.choice(KINDS)


def _word(cell: Cell) -> str:
    return "empty" if cell is None else cell[0]


def _count_out(matches: Sequence[bool], number: int) -> tuple[str, ...]:
    words = ("yes" if match else "no" for match in matches)
    return (*words, "so", str(number))


def _rows(problems: Sequence[PictureProblem], split: str) -> list[dict[str, Any]]:
    return [
        {
            **prompt_row(f"<image> {p.question}", p.answer, "shapes", split, i),
            "images": [{"bytes": p.picture}],
        }
        for i, p in enumerate(problems)
    ]


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
    picture = encode_png(draw(cells, rng))
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
    return encode_png(picture.resize((VIEW, VIEW), Image.Resampling.BICUBIC))
