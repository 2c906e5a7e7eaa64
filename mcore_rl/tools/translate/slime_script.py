"""Reads slime's options from scripts, without running them, or from a whole command line."""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from mcore_rl.tools.translate.bash_words import WHOLE_ARRAY, Computed, expand, statements_of
from mcore_rl.tools.translate.foreign import ForeignOptions

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
        starts = [i for i, word in enumerate(words) if _is_program(word)]
        if starts:
            command = takewhile(lambda w: not SHELL_GOES_ON.fullmatch(w), words[starts[0] :])
            self.commands.append([token for word in command for token in self._expand(word)])

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
