"""Variables of a block are those of before afterwards, also after an error."""

import os
from collections.abc import Mapping

import pytest

from mcore_rl.process.variables import set_variables
from tests.support.policy import python_files, read

NAME, OTHER = "MCORE_RL_TEST_ONE", "MCORE_RL_TEST_TWO"


@pytest.mark.parametrize("before", [{}, {NAME: "old"}, {NAME: "", OTHER: "old"}])
@pytest.mark.parametrize("within", [{NAME: "new"}, {NAME: None}, {NAME: "", OTHER: None}, {}])
def test_variables_are_set_and_restored(
    before: Mapping[str, str], within: Mapping[str, str | None]
) -> None:
    os.environ.update(before)
    whole = dict(os.environ)
    with pytest.raises(RuntimeError), set_variables(within):
        assert {name: os.environ.get(name) for name in within} == within
        for name in within:
            os.environ.pop(name, None)  # as code within the block may do
        raise RuntimeError
    assert dict(os.environ) == whole


def test_no_other_place_restores_a_variable() -> None:
    twins = [
        str(path)
        for path in python_files("mcore_rl", "launch", "checkpoint_tools")
        if "os.environ[" in read(path) and "] = before" in read(path)
    ]
    assert not twins, f"use process.variables: {twins}"
