"""Draws what a terminal shows while a command runs: `make console-picture`.

python -m tests.support.console_picture "   41  0." docs/console.svg mcore-rl train ...

command --> pseudo-terminal --> Screen --> SVG, once the screen has these words; then Ctrl-C
"""

import codecs
import fcntl
import html
import io
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS, LINES = 100, 45
QUIET_S = 0.3
"""A screen is taken once nothing was written for so long: a panel comes in pieces."""
END_S = 120.0
_TOKEN = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b(?!\[)[^\[]|[^\x1b]")
_CHAR = 12.2
"""Width of a character in the SVG: rich draws 20 px high characters."""
_FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" \
xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px Menlo, Consolas, monospace; }}
.{unique_id}-title {{ font: bold 18px sans-serif; }}
{styles}
</style>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""rich's own format names fonts of a server."""


class Screen:
    """A terminal as it looks after the text that it was fed, with as many lines as there are."""

    def __init__(self) -> None:
        self._rows: list[list[tuple[str, str]]] = [[]]
        self._row = self._column = 0
        self._style = ""
        self._rest = ""

    def feed(self, text: str) -> None:
        text = self._rest + text
        place = 0
        while found := _TOKEN.match(text, place):
            place = found.end()
            if found[2]:
                self._obey(found[1], found[2])
            elif found[0][0] != "\x1b":
                self._put(found[0])
        self._rest = text[place:]

    def _obey(self, argument: str, command: str) -> None:
        if command == "A":
            self._row = max(self._row - int(argument or 1), 0)
        elif command == "K" and argument == "2":
            self._rows[self._row] = []
        elif command == "m":
            self._style = "" if argument in ("", "0") else f"{self._style}\x1b[{argument}m"

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
            return
        if char == "\n" or self._column == COLUMNS:
            self._row += 1
            self._column = 0
            if self._row == len(self._rows):
                self._rows.append([])
        if char == "\n":
            return
        row = self._rows[self._row]
        row.extend([(" ", "")] * (self._column + 1 - len(row)))
        row[self._column] = (char, self._style)
        self._column += 1

    @property
    def lines(self) -> list[str]:
        """The lines without colors, and without blanks at their ends."""
        return ["".join(char for char, _ in row).rstrip() for row in self._rows]

    @property
    def colored(self) -> str:
        """The lines with the escapes that color them."""
        return "\n".join(map(_color, self._rows)).rstrip("\n")


def _color(row: Sequence[tuple[str, str]]) -> str:
    """Return a line with escapes where the style changes."""
    runs = ((style, "".join(c for c, _ in run)) for style, run in groupby(row, itemgetter(1)))
    return "".join(f"\x1b[0m{style}{text}" for style, text in runs)


def record(command: Sequence[str], words: str) -> Screen:
    """Run a command until the screen has these words and stands still; then send Ctrl-C, and wait
    for the end. Raises ValueError if the command ends before.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True
    )
    os.close(theirs)
    screen = Screen()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        stands_still = not select.select([ours], [], [], QUIET_S)[0]
        if stands_still and any(words in line for line in screen.lines):
            break
        if stands_still:
            continue
        try:
            screen.feed(decoder.decode(os.read(ours, 65536)))
        except OSError as error:
            shown = "\n".join(screen.lines)
            raise ValueError(f"the command ended without {words!r}:\n{shown}") from error
    process.send_signal(signal.SIGINT)
    _drain(ours)
    process.wait(END_S)
    return screen


def _drain(terminal: int) -> None:
    """Read what a command still writes, until it ends."""
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        os.close(terminal)


def draw(screen: Screen, command: Sequence[str]) -> str:
    """Return an SVG of the screen, below the command."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(f"\x1b[1m$ {shlex.join(command)}\x1b[0m\n{screen.colored}"))
    title = Path(command[0]).name
    svg = console.export_svg(title=title, theme=MONOKAI, code_format=_FORMAT, unique_id="console")
    return re.sub(r' clip-path="[^"]*"', "", svg)  # each of a line that it cuts nothing off


def read_lines(svg: str) -> list[str]:
    """Return the lines that a picture shows, from the top."""
    lines: dict[float, str] = {}
    matrix = next(
        each for each in ET.fromstring(svg).iter() if each.get("class") == "console-matrix"
    )
    for text in matrix:
        left, top = float(text.get("x", 0)), float(text.get("y", 0))
        words = html.unescape("".join(text.itertext())).replace("\xa0", " ")
        line = lines.get(top, "")
        lines[top] = line + " " * (round(left / _CHAR) - len(line)) + words
    return [lines[top].rstrip() for top in sorted(lines)]


if __name__ == "__main__":
    words, picture, *command = sys.argv[1:]
    Path(picture).write_text(draw(record(command, words), command))
