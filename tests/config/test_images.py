"""Options of images have bounds."""

from typing import Any

import pytest

from mcore_rl.config import ImagesConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bad": "drop"}, "data.images.bad='drop': expected one of 'error', 'skip'"),
        ({"cache_gib": 0.0}, "data.images.cache_gib=0.0: must be greater than 0"),
        ({"max_tokens": -1}, "data.images.max_tokens=-1: must be at least 0"),
        ({"max_pixels": 0}, "data.images.max_pixels=0: must be at least 1"),
        ({"max_mib": 0}, "data.images.max_mib=0: must be at least 1"),
    ],
)
def test_senseless_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        ImagesConfig(**changes)
    assert message in str(error.value)
