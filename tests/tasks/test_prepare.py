"""Arguments of `mcore-rl data`."""

import argparse
from pathlib import Path

import pytest

from mcore_rl.tasks.prepare import add_arguments


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    "kind", ["arithmetic", "countdown", "cartpole", pytest.param("code", marks=pytest.mark.slow)]
)
def test_made_problems_are_written_where_the_user_wants(kind: str, tmp_path: Path) -> None:
    assert parse(kind).out == Path("data", kind)
    args = parse(kind, "--out", str(tmp_path / "there"), "--seed", "3")
    args.run(args)
    assert (tmp_path / "there" / "train.parquet").is_file()


def test_a_kind_must_be_given() -> None:
    with pytest.raises(SystemExit):
        parse()
