"""Conditions of checks hold under `python -O` as well."""

import pytest

from mcore_rl.tools.doctor.check import expect


def test_an_unmet_condition_is_told() -> None:
    expect(True, "fine")
    with pytest.raises(AssertionError, match=r"^rank 1 differs$"):
        expect(False, "rank 1 differs")
