"""Formats errors, and text from models and users, for any file or terminal.

An error becomes one text that names the error's type and is never empty. This module imports the
standard library only, as short programs do.
"""

import traceback

from mcore_rl.process.disk import is_disk_full, name_full_disk


class ProcessLostError(RuntimeError):
    """A process that a worker supervises is gone; the message is complete without a traceback."""


def make_encodable(text: str, encoding: str = "utf-8") -> str:
    """Return `text` with a backslash escape for each character that `encoding` lacks.

    UTF-8 lacks only lone surrogates: "\\ud83d" in Python becomes the six characters \\ud83d.
    """
    return text.encode(encoding, errors="backslashreplace").decode(encoding)


def shorten(text: str, most_chars: int) -> str:
    """Return at most the first `most_chars` characters, and how many more there were."""
    if len(text) <= most_chars:
        return text
    return f"{text[:most_chars]}... ({len(text) - most_chars} more characters)"


def describe_error(error: BaseException, silent: str = "") -> str:
    """Return `ValueError: text`.

    silent   the text if the error has none, as asyncio's TimeoutError; by default the error's
             cause, or the place that raised the error

    For a full disk the text names file, free space and remedy.
    """
    name = type(error).__name__
    if isinstance(error, SystemExit):
        return f"{name}: the code tried to end the process with status {error.code!r}"
    try:
        text = str(error).strip()
    except KeyboardInterrupt:
        raise
    except BaseException as second:  # whatever an exception of the user's does
        return f"{name}, which has no text: its __str__ raised {type(second).__name__}"
    if is_disk_full(error):
        text = str(name_full_disk(error))
    return f"{name}: {text or silent or _describe_silent(error)}"


def _describe_silent(error: BaseException) -> str:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and str(cause).strip():
        return f"without a text, after {type(cause).__name__}: {str(cause).strip()}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "without a text"
    last = frames[-1]
    return f"without a text, raised at {last.filename}:{last.lineno} in {last.name}"
