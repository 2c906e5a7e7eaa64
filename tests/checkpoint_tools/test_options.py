"""Sizes are parsed and shown, workers carry out every task once, and wrong numbers are refused."""

import pytest

from checkpoint_tools.options import Effort, parse_bytes, show_bytes, work_through


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1048576", 1 << 20), ("512MiB", 512 << 20), ("4gb", 4 * 10**9), (" 1.5 KiB ", 1536)],
)
def test_sizes_are_parsed(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "much", "-1", "1 TiB", "1e3"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: write for example 512MiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 20, "1.0 MiB"), (3 << 30, "3.00 GiB")],
)
def test_sizes_are_shown(num_bytes: int, text: str) -> None:
    assert show_bytes(num_bytes) == text


def test_workers_share_the_memory() -> None:
    assert Effort(100, 3).worker_bytes == 33
    with pytest.raises(ValueError, match="--workers=0: at least 1"):
        Effort(100, 0)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_every_task_is_carried_out_once(num_workers: int) -> None:
    results: dict[int, int] = {}
    effort = Effort(1, num_workers)
    peak = work_through(
        lambda: square, list(range(20)), lambda _: 1, effort, "t", results.__setitem__
    )
    assert results == {task: task * task for task in range(20)}
    assert peak > 0


def square(task: int) -> int:
    return task * task
