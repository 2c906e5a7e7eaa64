"""Escapes text from models and users so that any file or terminal accepts it."""


def make_encodable(text: str, encoding: str = "utf-8") -> str:
    """Return `text` with a backslash escape for each character that `encoding` lacks.

    UTF-8 lacks only lone surrogates: "\\ud83d" in Python becomes the six characters \\ud83d.
    """
    return text.encode(encoding, errors="backslashreplace").decode(encoding)
