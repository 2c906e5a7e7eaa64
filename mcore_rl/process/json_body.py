"""Reads the JSON bodies that strangers send to a server of ours."""

import json
from typing import Any


def parse_json(data: bytes) -> Any:
    """Return the value in a body. Raises ValueError for all else, nested too deeply included."""
    try:
        return json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"the body is no JSON: {error}") from None
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
