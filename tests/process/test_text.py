"""Text that no encoding refuses."""

import pytest

from mcore_rl.process.errors import make_encodable


@pytest.mark.parametrize(
    ("text", "encoding", "expected"),
    [
        ("naïve ½", "utf-8", "naïve ½"),
        ("a\ud83db", "utf-8", "a\\ud83db"),
        ("naïve", "ascii", "na\\xefve"),
    ],
)
def test_what_an_encoding_lacks_is_escaped(text: str, encoding: str, expected: str) -> None:
    assert make_encodable(text, encoding) == expected
    assert make_encodable(text, encoding).encode(encoding)
