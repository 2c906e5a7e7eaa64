"""The test run itself: its signals, and what it writes down."""

import os
import signal
import zlib
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings

from mcore_rl.cpu.engine_forks import engine_forks
from mcore_rl.cpu.worker_forks import worker_forks
from mcore_rl.device.setup import let_megatron_import
from mcore_rl.process.gc_pause import without_collector
from tests.support import models_table
from tests.support.policy import ROOT
from tests.support.sglang_parsers import ParserProcess

# Processes of the package leave the working folder out, which has the tests. Workers of
# pytest-xdist find it named already: a second time, it would keep servers from forking.
_named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, (str(ROOT), *_named))))
# An example may wait for a busy machine; pytest's own limit holds for a whole test.
settings.register_profile("patient", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=25)
settings.load_profile("patient")
let_megatron_import()

LONG = ("e2e", "gloo")
"""Markers of tests that take seconds each."""
FORKS_PAY_FROM = 8
"""So many of them have their engines and workers forked by processes that import once for all."""
LAST = 1 << 32
"""The turn of files without such tests, behind any crc32."""
_forks = ExitStack()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--models-table",
        type=Path,
        help="write what the tests of model families measured into this document",
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the processes that fork where the tests run, unless they run already."""
    runs_tests = "PYTEST_XDIST_WORKER" in os.environ or not session.config.getoption("-n", None)
    if runs_tests and sum(map(_is_long, session.items)) >= FORKS_PAY_FROM:
        _start_forks()


def _start_forks() -> None:
    _forks.enter_context(worker_forks())
    _forks.enter_context(engine_forks())


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    _forks.close()
    path = session.config.getoption("--models-table")
    if path:
        models_table.write(path)


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C reach the processes that tests start, also if the test run is a background job.

    A shell without job control starts background jobs with SIGINT ignored, and every child
    inherits that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _shares_out_all_tests(config):
        _start_forks()


def _shares_out_all_tests(config: pytest.Config) -> bool:
    """Return whether this process starts workers of pytest-xdist, which then find its forks."""
    starts_workers = "PYTEST_XDIST_WORKER" not in os.environ and config.getoption("-n", None)
    asks_for_all = config.args_source is not pytest.Config.ArgsSource.ARGS
    return bool(starts_workers) and asks_for_all and not config.option.collectonly


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from what tests import, which lives as long as the test run.

    It would walk through all of that a hundred times: a tenth of the time of tests that compute.
    """
    with without_collector():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that start processes: at the end, workers share out what is short.

    What one file makes and others wait for is shared within a folder: so those of a folder come
    apart, in an order that is the same in every run.
    """
    long = {item.path for item in items if _is_long(item)}
    turns = {path: zlib.crc32(path.stem.encode()) for path in long}
    items.sort(key=lambda item: turns.get(item.path, LAST))


def _is_long(item: pytest.Item) -> bool:
    marked = any(map(item.get_closest_marker, LONG))
    return marked or bool({"e2e", "scenarios"} & set(item.path.parts))


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


@pytest.fixture(autouse=True)
def _environment_is_as_before() -> Iterator[None]:
    """Take back the variables that a test sets, as commands that run in this process do."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
