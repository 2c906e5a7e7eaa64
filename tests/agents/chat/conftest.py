"""SGLang's parsers, started once for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.support.sglang_parsers import ParserProcess


@pytest.fixture(scope="session")
def parser_process() -> Iterator[ParserProcess]:
    process = ParserProcess()
    yield process
    process.close()


@pytest.fixture
def sglang(parser_process: ParserProcess) -> ParserProcess:
    """The parsers, with nothing asked yet."""
    parser_process.asked.clear()
    return parser_process
