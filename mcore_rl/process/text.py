"""Makes text from models and users fit for any file or terminal."""


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
