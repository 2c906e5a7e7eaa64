"""Reads slime's options from scripts, without running them, or from a whole command line.

Splits the text of a bash script into statements of words, and expands the words that can be.

Nothing is run: a word that bash would have to compute, as $(seq 16 8 256), stays as its text;
sums and products of known numbers, as $((2 * NUM_NODES)), are worked out.
"""

import ast
import json
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from mcore_rl.tools.translate.translation import ForeignOptions

CLOSERS = {"$(": ")", "${": "}", "(": ")"}
VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^{}$]*))?\}|\$(\w+)")
WHOLE_ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')


ARITHMETIC = re.compile(r"\$\(\(([\w\s+*/()$-]+)\)\)")
OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}


class Computed(str):
    """A word of a script whose value only a run of the script would tell."""


Variables = Mapping[str, str]
Arrays = Mapping[str, Sequence[str]]


def statements_of(text: str) -> Iterator[list[str]]:
    """Yield the words of each statement, with their quotes; arrays in parentheses are one word."""
    words: list[str] = []
    position = 0
    while position < len(text):
        char = text[position]
        if text.startswith("\\\n", position):
            position += 2
        elif char in "\n;":
            if words:
                yield words
            words = []
            position += 1
        elif char.isspace():
            position += 1
        elif char == "#":
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
        else:
            end = end_of_word(text, position)
            words.append(text[position:end])
            position = end
    if words:
        yield words


def end_of_word(text: str, position: int) -> int:
    """Return where the word that begins at `position` ends."""
    while position < len(text) and not text[position].isspace() and text[position] != ";":
        position = _end_of_part(text, position)
    return position


def _end_of_part(text: str, position: int) -> int:
    """Return the end of a quoted or bracketed part, or of a single character."""
    if text[position] == "\\":
        return min(position + 2, len(text))
    if text[position] in "'\"`":
        return _end_of_quote(text, position)
    for opener in CLOSERS:
        if text.startswith(opener, position):
            return _end_of_brackets(text, position + len(opener), CLOSERS[opener])
    return position + 1


def _end_of_quote(text: str, position: int) -> int:
    quote = text[position]
    position += 1
    while position < len(text) and text[position] != quote:
        if quote == '"' and text.startswith(("$(", "${"), position):
            position = _end_of_part(text, position)
        else:
            position += 2 if text[position] == "\\" and quote != "'" else 1
    return min(position + 1, len(text))


def _end_of_brackets(text: str, position: int, closer: str) -> int:
    while position < len(text) and text[position] != closer:
        begins_comment = text[position] == "#" and text[position - 1].isspace()
        if begins_comment:
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
        else:
            position = _end_of_part(text, position)
    return min(position + 1, len(text))


def _work_out(text: str, variables: Variables) -> int | None:
    """Return what $((text)) is; None: it names what is unknown, or is no sum or product."""
    try:
        tree = ast.parse(text.replace("$", "").strip(), mode="eval").body
    except SyntaxError:
        return None

    def value_of(node: ast.expr) -> int | None:
        if isinstance(node, ast.Name):
            known = variables.get(node.id, os.environ.get(node.id, ""))
            return int(known) if known.isdigit() else None
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, int) else None
        if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
            return None
        left, right = value_of(node.left), value_of(node.right)
        if left is None or right is None or (isinstance(node.op, ast.Div) and right == 0):
            return None
        return OPERATORS[type(node.op)](left, right)

    return value_of(tree)


def _replace_sums(word: str, variables: Variables) -> str:
    """Return a word in which each known sum, $((...)), is replaced by its value."""

    def value_of(match: re.Match[str]) -> str:
        value = _work_out(match[1], variables)
        return match[0] if value is None else str(value)

    return ARITHMETIC.sub(value_of, word)


def expand(word: str, variables: Variables, arrays: Arrays) -> list[str]:
    """Return the words that bash makes of one; those that it would compute as they are written."""
    whole = WHOLE_ARRAY.fullmatch(word)
    if whole:
        return list(arrays.get(whole[1], [Computed(word)]))
    if word.startswith("'"):
        return [word[1:].removesuffix("'")]
    is_computed = False

    def value_of(match: re.Match[str]) -> str:
        nonlocal is_computed
        name = match[1] or match[3]
        value = variables.get(name, os.environ.get(name, match[2]))
        is_computed |= value is None or isinstance(value, Computed)
        return value or ""

    word = _replace_sums(word, variables)
    bare = re.sub(r"(?<!\\)['\"]", "", word)
    plain = VARIABLE.sub(value_of, re.sub(r"\\(.)", r"\1", bare))
    if is_computed or any(mark in VARIABLE.sub("", bare) for mark in ("$", "`")):
        return [Computed(word.strip('"'))]
    return [plain] if word.startswith('"') or not plain else plain.split()


PROGRAMS = ("train.py", "train_async.py")
ASSIGNMENT = re.compile(r"(\w+)(\+?=)(.*)", re.DOTALL)
OPENERS = frozenset({"if", "for", "while", "until", "case"})
ENDS = frozenset({"fi", "done", "esac"})
IN_BRANCH = Computed("(in a branch of the script)")
SHELL_GOES_ON = re.compile(r"\d*[<>|&].*", re.DOTALL)


class Script:
    """The variables and arrays of a script as it is read, and the commands that start slime."""

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}
        self.commands: list[list[str]] = []
        self.missing: dict[str, str] = {}

    def read(self, path: Path, depth: int = 0) -> None:
        """Read a script and those that it sources. Raises ValueError if there is no such file."""
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: the script cannot be read: {error}") from None
        for words in statements_of(text):
            while words and words[0] in ("then", "else", "do", "export", "local", "declare"):
                words = words[1:]
            if not words:
                continue
            depth += (words[0] in OPENERS) - (words[0] in ENDS)
            self._take(words, path, depth > 0)

    def _take(self, words: list[str], path: Path, in_branch: bool) -> None:
        while words and (assignment := ASSIGNMENT.fullmatch(words[0])):
            self._assign(assignment[1], assignment[2], assignment[3], in_branch)
            words = words[1:]
        if words and words[0] in ("source", ".") and len(words) > 1:
            self._source(words[1], path, in_branch)
        self._refuse_options(words, path)
        starts = [i for i, word in enumerate(words) if _is_program(word)]
        if starts:
            command = takewhile(lambda w: not SHELL_GOES_ON.fullmatch(w), words[starts[0] :])
            self.commands.append([token for word in command for token in self._expand(word)])

    def _refuse_options(self, words: list[str], path: Path) -> None:
        """Raise ValueError for options where a command begins: the command before would lose them.

        bash runs such a line as a command of its own, after slime has ended.
        """
        whole = WHOLE_ARRAY.fullmatch(words[0]) if words else None
        items = self.arrays.get(whole[1], []) if whole else words
        if self.commands and items and items[0].startswith("--"):
            raise ValueError(
                f"{path}: {words[0]} begins a command of its own, and slime does not get its"
                " options: the line before it lacks a \\ at its end"
            )

    def _expand(self, word: str) -> list[str]:
        whole = WHOLE_ARRAY.fullmatch(word)
        if whole and whole[1] not in self.arrays and not self.missing:
            return []
        return expand(word, self.variables, self.arrays)

    def _assign(self, name: str, sign: str, value: str, in_branch: bool) -> None:
        if not value.startswith("("):
            [expanded, *_] = [*self._expand(value), ""]
            self.variables[name] = IN_BRANCH if in_branch else expanded
            return
        inner = [word for words in statements_of(value[1:-1]) for word in words]
        items = [token for word in inner for token in self._expand(word)]
        if in_branch:
            items = [part for item in items for part in (item, IN_BRANCH)]
        kept = self.arrays.get(name, []) if sign == "+=" or in_branch else []
        self.arrays[name] = [*kept, *items]

    def _source(self, word: str, path: Path, in_branch: bool) -> None:
        [named] = self._expand(word) or [word]
        # Folders that the script computes are those around it.
        parts = Path(re.split(r"[)}]", named)[-1] if isinstance(named, Computed) else named).parts
        tails = [Path(*parts[i:]) for i in range(len(parts)) if parts[i] not in ("/", "..")]
        places = [Path(named), *(folder / t for t in tails for folder in path.resolve().parents)]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            self.missing[f"source {named}"] = named
        else:
            self.read(found, int(in_branch))


def _is_program(word: str) -> bool:
    return word.strip("\"'").rsplit("/", 1)[-1] in PROGRAMS


def read_slime(arguments: Sequence[str]) -> ForeignOptions:
    """Return the options of scripts and of options `--name value`; later ones win.

    A whole command line may have anything before the program that is run: `ray job submit ...
    -- python3 train.py --lr 1e-6`. Raises ValueError naming the script or the word that cannot be
    read.
    """
    script = Script()
    rest = list(arguments)
    while rest and rest[0].endswith(".sh"):
        script.read(Path(rest[0]))
        if len(script.commands) > 1:
            raise ValueError(
                f"{rest[0]}: {len(script.commands)} commands start slime: keep one of them, or give"
                " its options after `--`"
            )
        rest = rest[1:]
    if len(arguments) > len(rest) and not script.commands:
        raise ValueError(f"{arguments[0]}: no command in it runs {' or '.join(PROGRAMS)}")
    starts = [i for i, word in enumerate(rest) if _is_program(word)]
    commands = [*script.commands, rest[starts[0] :] if starts else rest]
    given: dict[str, Any] = {}
    unreadable = dict(script.missing)
    for name, values in (pair for tokens in commands for pair in _pairs(tokens)):
        given.pop(name, None)
        unreadable.pop(name, None)
        if any(isinstance(value, Computed) for value in values) or isinstance(name, Computed):
            unreadable[name] = " ".join(dict.fromkeys(values))
        else:
            given[name] = _value(values)
    programs = [tokens[0] for tokens in commands if tokens and _is_program(tokens[0])]
    program = programs[-1].rsplit("/", 1)[-1] if programs else ""
    return ForeignOptions(given, False, program, unreadable)


def _pairs(tokens: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option with the words that follow it, and each word that nobody can place."""
    name = ""
    values: list[str] = []
    for token in tokens[1:] if tokens and _is_program(tokens[0]) else tokens:
        if token.startswith("--") or (isinstance(token, Computed) and not name):
            if name:
                yield name, values
            name = token
            values = []
            if "=" in token and not isinstance(token, Computed):
                name, _, value = token.partition("=")
                values = [value]
        elif not name:
            raise ValueError(
                f"{token}: neither a script (.sh) nor an option --name; of a command line give"
                f" what follows {' or '.join(PROGRAMS)}"
            )
        elif isinstance(token, Computed) and token.startswith("${") and "[@]" in token:
            yield name, values
            name = token
            values = [str(token)]
        else:
            values.append(token)
    if name:
        yield name, values


def _value(values: Sequence[str]) -> Any:
    """Return an option's value: true without a word, a list of several words."""
    if len(values) > 1:
        return [_scalar(value) for value in values]
    return _scalar(values[0]) if values else True


def _scalar(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return {"true": True, "false": False}.get(text.lower(), text)
