"""Splits the text of a bash script into statements of words, and expands the words that can be.

Nothing is run: a word that bash would have to compute, as $(seq 16 8 256), stays as its text.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence

CLOSERS = {"$(": ")", "${": "}", "(": ")"}
VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^{}$]*))?\}|\$(\w+)")
WHOLE_ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')


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

    bare = re.sub(r"(?<!\\)['\"]", "", word)
    plain = VARIABLE.sub(value_of, re.sub(r"\\(.)", r"\1", bare))
    if is_computed or any(mark in VARIABLE.sub("", bare) for mark in ("$", "`")):
        return [Computed(word.strip('"'))]
    return [plain] if word.startswith('"') or not plain else plain.split()
