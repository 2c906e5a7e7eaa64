"""Text from models and users in, text that any file or terminal accepts out."""


def make_encodable(text: str, encoding: str = "utf-8") -> str:
    """Return `text` with a backslash escape for each character that `encoding` lacks.

    UTF-8 lacks only lone surrogates: "\\ud83d" in Python becomes the six characters \\ud83d.
    """
    return text.encode(encoding, errors="backslashreplace").decode(encoding)
