"""Settings stand before, between and behind options; a word that is neither is refused."""

import argparse

import pytest

from mcore_rl.process.command_line import parse_arguments
from mcore_rl.tools.doctor.command import add_arguments


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mcore-rl")
    commands = parser.add_subparsers(required=True)
    add_arguments(commands.add_parser("doctor"))
    commands.add_parser("other").add_argument("file")
    return parser


@pytest.mark.parametrize(
    "words",
    [
        "doctor a.b=1 c=2 --gpu --logs /x",
        "doctor a.b=1 --gpu c=2 --logs /x",
        "doctor --gpu a.b=1 --logs /x c=2",
        "doctor --gpu --logs /x a.b=1 c=2",
    ],
)
def test_settings_keep_their_order_wherever_they_stand(words):
    args = parse_arguments(make_parser(), words.split())
    assert list(args.settings) == ["a.b=1", "c=2"]
    assert args.gpu and str(args.logs) == "/x"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("doctor a=1 --gpu --color=red b=2", "--color=red"),
        ("doctor a=1 --gpu nonsense", "nonsense"),
        ("other file a=1", "a=1"),
    ],
)
def test_other_words_are_refused_by_name(words, named, capsys):
    with pytest.raises(SystemExit) as refused:
        parse_arguments(make_parser(), words.split())
    assert refused.value.code == 2
    told = capsys.readouterr().err
    assert f"unrecognized arguments: {named}" in told
    assert ("key=value: color=<value>" in told) == (named == "--color=red")
