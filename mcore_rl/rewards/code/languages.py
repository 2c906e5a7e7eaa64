"""Finds the program in a response, and knows the languages in which programs may be written."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.services.sandbox.languages import ALIASES

PROGRAM_LANGUAGES = {
    "python": "Python",
    "c": "C",
    "cpp": "C++",
    "go": "Go",
    "rust": "Rust",
    "java": "Java",
    "nodejs": "JavaScript",
    "typescript": "TypeScript",
    "bash": "Bash",
    "sql": "SQL",
}
"""Name in the sandbox -> name in a sentence. A machine need not have all of them."""
FURTHER_TAGS = {"cc": "cpp", "cxx": "cpp", "rs": "rust", "sqlite3": "sql"}
"""Tags of fenced blocks besides the names and aliases of the sandbox."""
_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Program:
    source: str
    language: str = "python"


PAIRS_FUNCTION = "solve"


@dataclass(frozen=True)
class PairLanguage:
    """A language of functions of two numbers, too small to do harm: programs share a sandbox.

    to_python       whole answer -> Python source of a function `solve(cases)`, which returns the
                    value of each pair, or None where it has none; None: the answer is no program
    tell_failure    (a, b, value, wanted value) -> what the policy is told of a failed public test
    read_test       whole answer -> (pair, wanted value); None: the answer is no unit test
    """

    to_python: Callable[[str], str | None]
    tell_failure: Callable[[int, int, int | None, int | None], str]
    read_test: Callable[[str], tuple[tuple[int, int], int] | None]


def read_languages(given: Any) -> tuple[str, ...]:
    """Return the languages that a ground truth names: a name, several, or none for Python.

    Raises ValueError for a name that is not known.
    """
    names = [given] if isinstance(given, str) else list(given or ["python"])
    languages = tuple(_language_of(str(name)) for name in names)
    for name, language in zip(names, languages, strict=True):
        if language not in PROGRAM_LANGUAGES:
            raise ValueError(
                f"language is {name!r}: one of {', '.join(PROGRAM_LANGUAGES)}, or in a ground truth"
                " a list of them"
            )
    return languages


def blocks_of(response: str) -> list[tuple[str, str]]:
    """Return the fenced blocks of a response as (tag in lower case or "", text)."""
    blocks = []
    for tag, text in _BLOCK.findall(response):
        words = tag.lower().split()
        blocks.append((words[0] if words else "", text))
    return blocks


def program_of(response: str, languages: Sequence[str] = ("python",)) -> Program | None:
    """Return the last fenced block in one of the languages; None if there is none.

    A block without a tag is in the first of them.
    """
    for tag, text in reversed(blocks_of(response)):
        language = _language_of(tag) if tag else languages[0]
        if language in languages:
            return Program(text, language)
    return None


def _language_of(name: str) -> str:
    known = ALIASES.get(name.lower(), name.lower())
    return FURTHER_TAGS.get(known, known)
