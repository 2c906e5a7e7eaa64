"""Images in messages, as OpenAI's chat format has them: parts with a data: URL.

Nothing here needs a package, so environments of any interpreter can use it.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

SCHEME = "data:"


def image_part(data: bytes, kind: str = "png") -> dict[str, Any]:
    """Return the part of a message that shows an encoded image; `kind` as in image/png."""
    url = f"{SCHEME}image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def image_bytes(part: Mapping[str, Any]) -> bytes:
    """Return the encoded image of a part. Raises ValueError for a URL that is no data: URL."""
    found = part.get("image_url")
    url = found.get("url") if isinstance(found, Mapping) else found
    header, comma, text = str(url).partition(",")
    if not header.startswith(SCHEME) or not header.endswith(";base64") or not comma:
        raise ValueError(
            f"an image at {url!r:.80}: nothing is fetched, so give its bytes as"
            " data:image/png;base64,..."
        )
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"an image whose base64 is damaged: {error}") from error


def images_in(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the encoded images of messages, in order."""
    return [
        image_bytes(part)
        for message in messages
        if not isinstance(message.get("content"), str)
        for part in message.get("content") or ()
        if part.get("type") == "image_url"
    ]
