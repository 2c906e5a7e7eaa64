"""A picture of a terminal has what the terminal shows: its numbers, read back, draw it again."""

import io
import re
import sys
from collections.abc import Sequence

import pytest
from rich.console import Console as RichConsole

from mcore_rl.logs.console import COLUMNS, SIGNAL, LiveConsole
from tests.support.console_picture import COLUMNS as WIDTH
from tests.support.console_picture import Screen, draw, read_lines, record

RUN = """
import sys, time
from rich.console import Console
from mcore_rl.logs.console import LiveConsole
from mcore_rl.logs.progress import say, tell_progress, tell_stage

with tell_progress(poll_s=1.0):
    say("start-up: trainer 3.2s")
    panel = LiveConsole(Console(file=sys.stdout), "mine", 20)
    for step in range(1, 7):
        row = {"reward/mean": step / 10, "reward/groups_without_signal": 0.25,
               "rollout/truncated_share": 0.5, "rollout/tokens_per_second": 1234.0,
               "time/rollout": 2.5, "time/train": 1.0}
        panel.show(step, row | ({"eval/greedy_accuracy": 0.375} if step == 5 else {}))
        time.sleep(0.05)
    say("saved step 6")
    with tell_stage("step 7: rollout"):
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            panel.close()
"""


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of a picture of a process that shows steps in its terminal."""
    file = tmp_path_factory.mktemp("run") / "run.py"
    file.write_text(RUN)
    command = [sys.executable, str(file)]
    svg = draw(record(command, "step 7: rollout for"), command)
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", ""), "no fonts of a server"
    return read_lines(svg)


def cut(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the lines above the panel, and those in it without its sides."""
    top = next(i for i, line in enumerate(lines) if line.startswith("╭"))
    return list(lines[:top]), [line.strip("╭─╮│╰╯").rstrip() for line in lines[top:]]


def read_table(panel: Sequence[str]) -> dict[int, dict[str, float]]:
    """Return step -> the metrics of its row; a number ends where the label of its column does."""
    head = next(i for i, line in enumerate(panel) if line.split()[:2] == ["step", "reward"])
    columns = {column.short or column.label: column.names[0] for column in COLUMNS}
    ends = {found.end(): found[0] for found in re.finditer(r"\S+", panel[head])}
    rows: dict[int, dict[str, float]] = {}
    for line in panel[head + 2 : panel.index("", head)]:
        cells = {ends[found.end()]: found[0] for found in re.finditer(r"\S+", line)}
        step = int(cells.pop("step"))
        rows[step] = {columns[label]: read_number(cell) for label, cell in cells.items()}
    return rows


def read_number(text: str) -> float:
    number = float(text.rstrip("%").replace(",", ""))
    return number / 100 if text.endswith("%") else number


def find_legend(panel: Sequence[str]) -> str:
    """Return the line below the bar of the phases."""
    return next(panel[i + 1] for i, line in enumerate(panel) if line.startswith(" ━"))


def test_the_panel_is_what_the_console_draws_of_its_numbers(picture: list[str]) -> None:
    _, panel = cut(picture)
    rows = read_table(panel)
    assert rows[5]["eval/greedy_accuracy"] == 0.375 and len(rows) == 6
    for row in rows.values():
        row["reward/groups_without_signal"] = 1.0 - row.pop(SIGNAL)
    phases = re.findall(r"(\w+) ([\d.]+)s", find_legend(panel))
    rows[max(rows)] |= {f"time/{phase}": float(seconds) for phase, seconds in phases}
    stream = io.StringIO()
    console = LiveConsole(RichConsole(file=stream, width=WIDTH, force_terminal=True), "mine", 20)
    for step, row in rows.items():
        console.show(step, row)
    console.close()
    screen = Screen()
    screen.feed(stream.getvalue())
    _, drawn = cut(screen.lines)
    assert drawn[0] == panel[0] and drawn[2:5] == panel[2:5]
    assert read_table(drawn) == read_table(panel)
    assert find_legend(drawn) == find_legend(panel) == "   rollout 2.5s  train 1.0s"


def test_the_command_and_what_is_told_stand_above_the_panel(picture: list[str]) -> None:
    above, panel = cut(picture)
    assert above[0].startswith("$ ") and above[0].endswith("run.py")
    assert above[1:] == ["start-up: trainer 3.2s", "saved step 6"]
    assert any(re.fullmatch(r" step 7: rollout for 0:0\d", line) for line in panel)


def test_a_command_that_ends_too_soon_is_told_with_its_output() -> None:
    with pytest.raises(ValueError, match=r"(?s)ended without 'step 9'.*nothing here"):
        record([sys.executable, "-c", "print('nothing here')"], "step 9")


def test_escapes_and_letters_may_come_in_pieces() -> None:
    whole = "one\r\n\x1b[1mtwo\x1b[0m\r\nthree\x1b[1A\r\x1b[2Kzwei"
    for cut_at in range(len(whole)):
        screen = Screen()
        screen.feed(whole[:cut_at])
        screen.feed(whole[cut_at:])
        assert screen.lines == ["one", "zwei", "three"]


def test_a_picture_has_the_letters_of_html() -> None:
    screen = Screen()
    screen.feed("\x1b[31mred\x1b[0m and plain & <b>\r\n")
    svg = draw(screen, ["mcore-rl", "train", "a b"])
    assert read_lines(svg)[:2] == ["$ mcore-rl train 'a b'", "red and plain & <b>"]
