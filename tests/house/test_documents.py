"""Commands in the documents exist: make targets, arguments, recipes with their overrides, files."""

import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from checkpoint_tools.cli import make_parser as make_tools_parser
from mcore_rl.cli import make_parser
from mcore_rl.config.recipe import load_recipe
from mcore_rl.weights.models import CAUSAL, REFUSED
from tests.support import models_table
from tests.support.policy import ROOT, read, tracked
from tests.support.tiny_models import MODELS

RUNNERS = {"python", "python3", "python3.11", "bash", "sh"}
FENCE = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINE_LEN = 120
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def documents() -> list[Path]:
    return tracked(".md")


def commands(text: str) -> Iterator[list[str]]:
    """Yield the commands of fenced shell blocks, without comments and prompts, one at a time."""
    for block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            without_comment = re.sub(r"(^|\s)#.*", "", line.removeprefix("$ "))
            for words in re.split(r"&&|\||;", without_comment):
                parts = shlex.split(words)
                while parts and re.fullmatch(r"\w+=\S*", parts[0]):
                    parts.pop(0)
                if parts:
                    yield parts


def long_lines(text: str) -> Iterator[int]:
    """Yield the numbers of lines of prose that are too long and could break.

    Tables, fenced blocks, links and inline code cannot break.
    """
    is_fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        is_fenced ^= line.lstrip().startswith("```")
        if is_fenced or line.lstrip().startswith("|") or len(line) <= LINE_LEN:
            continue
        marked = re.sub(r"`[^`]*`|^\s*([*+-]|\d+\.)\s", lambda m: "x" * len(m[0]), line)
        if " " in marked[:LINE_LEN].lstrip():
            yield number


def check(words: list[str]) -> None:
    """Fails on a command of this project that does not exist; says nothing about other programs."""
    program, *arguments = words
    name = Path(program).name
    if name == "make":
        targets = set(re.findall(r"^([a-z_-]+):", read(Path("Makefile")), re.MULTILINE))
        unknown = [word for word in arguments if "=" not in word and word not in targets]
        assert not unknown, f"make has no target {unknown}"
    elif name == "mcore-rl":
        check_cli(tuple(arguments))
    elif name == "mcore-rl-ckpt":
        check_arguments(make_tools_parser(), name, arguments)
    elif (
        name in RUNNERS and arguments and arguments[0] != "-m" and not arguments[0].startswith("-")
    ):
        assert (ROOT / arguments[0]).is_file(), f"no file {arguments[0]}"


def check_arguments(parser: ArgumentParser, name: str, arguments: list[str]) -> Namespace:
    try:
        return parser.parse_args(arguments)
    except SystemExit as stop:
        assert stop.code == 0, f"{name} refuses {arguments}"
        return Namespace()


@cache
def check_cli(arguments: tuple[str, ...]) -> None:
    parsed = check_arguments(make_parser(), "mcore-rl", list(arguments))
    settings = getattr(parsed, "settings", [])
    if recipes := [word.removeprefix("recipe=") for word in settings if word.startswith("recipe=")]:
        load_recipe(recipes[0], [word for word in settings if not word.startswith("recipe=")])


def test_every_family_is_in_the_table_of_models_with_what_was_measured() -> None:
    text = read(Path("docs/models.md"))
    table, refused = text.split(models_table.BEGIN)[1].split(models_table.END)
    rows = models_table.read_rows(table)
    assert rows.keys() == models_table.MODELS.keys() == MODELS.keys()
    assert {row[0] for row in rows.values()} == {family.architecture for family in CAUSAL}
    for kind, row in rows.items():
        assert all(row[2:]), f"{kind} was not measured: {row}"
    assert not [architecture for architecture in REFUSED if architecture not in refused]


def find_targets_in_prose(text: str) -> Iterator[list[str]]:
    """Yield each `make target` that prose names, with its variables."""
    yield from (["make", *words.split()] for words in re.findall(r"`make ([^`\n]+)`", text))


@pytest.mark.parametrize("path", documents(), ids=str)
def test_documented_commands_exist(path: Path) -> None:
    text = read(path)
    told = (
        [] if path.name == "CHANGELOG.md" else find_targets_in_prose(text)
    )  # it names former ones
    for words in [*commands(text), *told]:
        try:
            check(words)
        except (AssertionError, ValueError) as error:
            pytest.fail(f"{path}: {shlex.join(words)}: {error}")


@pytest.mark.parametrize("path", documents(), ids=str)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    targets = LINK.findall(read(path))
    missing = [target for target in targets if not (ROOT / path.parent / target).exists()]
    assert not missing, f"{path} links to {missing}"


@pytest.mark.parametrize("path", documents(), ids=str)
def test_lines_are_short(path: Path) -> None:
    long = list(long_lines(read(path)))
    assert not long, f"{path} has lines of more than {LINE_LEN} characters: {long}"


def test_nobody_is_told_to_install_this_package_from_an_index() -> None:
    """No index has it, so such a command fails, or installs what a stranger uploads by its name."""
    paths = [path for path in (*tracked(".md"), *tracked(".py")) if path.parts[0] != "tests"]
    told = re.compile(r"pip install\s[^\n`]*\bmcore[_-]rl\b")
    assert not [path for path in paths if told.search(read(path))]


def test_a_long_line_is_found() -> None:
    words = "word " * 30
    link = f"[link](https://example.org/{'x' * LINE_LEN})"
    text = f"{words}\n| {words} |\n```\n{words}\n```\n* {link}\n  `{words}`\n* {words} {link}\n"
    assert list(long_lines(text)) == [1, 8]


def test_make_runs_the_commands_it_documents() -> None:
    lines = re.findall(
        r"^\t\$\(BIN\)/(mcore-rl .*|python benchmarks/.*)$", read(Path("Makefile")), re.MULTILINE
    )
    assert lines
    for line in lines:
        check(shlex.split(re.sub(r"\$\(\w+\)", "0", line)))


def test_the_readme_names_the_two_commands() -> None:
    found = list(commands(read(Path("README.md"))))
    assert ["make", "quickstart"] in found
    assert ["make", "test"] in found


@pytest.mark.parametrize(
    "line",
    [
        "make nonsense",
        "mcore-rl nonsense",
        "mcore-rl train recipe=nonsense",
        "mcore-rl-ckpt to-hf checkpoint out",
        "mcore-rl train recipe=tiny_moe_grpo rollout.nonsense=1",
        "A=1 python benchmarks/nonsense.py && ls",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        for words in commands(f"```bash\n{line}  # comment\n```\n"):
            check(words)


def test_a_wrong_target_in_prose_is_found() -> None:
    assert list(find_targets_in_prose("run `make nonsense A=1` or `make test`")) == [
        ["make", "nonsense", "A=1"],
        ["make", "test"],
    ]
