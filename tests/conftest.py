"""The test run itself: its signals, and what it writes down."""

import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from mcore_rl.process.lazy_imports import without_collector
from tests.support import models_table
from tests.support.sglang_parsers import ParserProcess

LONG = ("e2e", "gloo")
"""Markers of tests that take seconds each."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--models-table",
        type=Path,
        help="write what the tests of model families measured into this document",
    )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path = session.config.getoption("--models-table")
    if path:
        models_table.write(path)


def pytest_configure() -> None:
    """Let Ctrl-C reach the processes that tests start, also if the test run is a background job.

    A shell without job control starts background jobs with SIGINT ignored, and every child
    inherits that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from what tests import, which lives as long as the test run.

    It would walk through all of that a hundred times: a tenth of the time of tests that compute.
    """
    with without_collector():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that start processes: at the end, workers share out what is short."""
    long = {item.path for item in items if any(map(item.get_closest_marker, LONG))}
    long |= {item.path for item in items if {"e2e", "scenarios"} & set(item.path.parts)}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session")
def parser_process() -> Iterator[ParserProcess]:
    """SGLang's parsers, started once."""
    process = ParserProcess()
    yield process
    process.close()


@pytest.fixture
def sglang(parser_process: ParserProcess) -> ParserProcess:
    """The parsers, with nothing asked yet."""
    parser_process.asked.clear()
    return parser_process
