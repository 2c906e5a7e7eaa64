"""Bodies of strangers are values of JSON, or refused with a reason."""

import pytest

from mcore_rl.process.server_keys import parse_json


def test_json_is_read() -> None:
    assert parse_json(b'{"a": [1, null, "\xc3\xbc"]}') == {"a": [1, None, "ü"]}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the body is no JSON: Expecting value"),
        (b"{", "the body is no JSON: "),
        (b'"\xff"', "the body is no JSON: 'utf-8' codec"),
        (b"[" * 200_000, "the body is nested too deeply"),
        (b'{"a":' * 200_000, "the body is nested too deeply"),
    ],
)
def test_all_else_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        parse_json(data)
