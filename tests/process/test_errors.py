"""An error is told with its type and a text, which is never empty."""

import asyncio
import errno
from pathlib import Path

import pytest

from mcore_rl.process.errors import describe_error


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no"), "ValueError: no"),
        (SystemExit(2), "SystemExit: the code tried to end the process with status 2"),
        (_Mute(), "_Mute, which has no text: its __str__ raised RuntimeError"),
        (KeyError(" "), "KeyError: ' '"),
        (TimeoutError(" "), "TimeoutError: without a text"),
        (
            raised(TimeoutError(), OSError("the engine left")),
            "TimeoutError: without a text, after OSError: the engine left",
        ),
    ],
)
def test_type_and_text_are_told(error: BaseException, told: str) -> None:
    assert describe_error(error) == told


def test_an_error_without_a_text_is_told_by_what_was_waited_for_or_by_its_place() -> None:
    async def wait() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(5)

    with pytest.raises(TimeoutError) as caught:
        asyncio.run(wait())
    assert str(caught.value) == "", "asyncio tells more by now"
    silent = "no answer within 0.01 s"
    assert describe_error(caught.value, silent) == f"TimeoutError: {silent}"
    assert describe_error(ValueError("no"), silent) == "ValueError: no"
    told = describe_error(caught.value)
    assert told.startswith("TimeoutError: without a text, raised at ") and ".py:" in told


def test_a_full_disk_is_told_with_file_and_remedy(tmp_path: Path) -> None:
    told = describe_error(OSError(errno.ENOSPC, "full", str(tmp_path / "a")))
    assert told.startswith(f"OSError: cannot write {tmp_path / 'a'}: no space left on device; ")
    assert "run the same command again" in told
