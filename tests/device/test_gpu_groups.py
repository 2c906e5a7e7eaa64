"""The environment in which a communicator is made; tests/stream tests communicators."""

import os

import pytest

from mcore_rl.device.gpu_groups import _environment

NAME = "MCORE_RL_TEST_OF_GPU_GROUPS"


@pytest.mark.parametrize("before", [None, "", "1"])
def test_the_environment_is_as_before_even_after_an_error(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)
    with pytest.raises(RuntimeError), _environment(NAME, "0"):
        assert os.environ[NAME] == "0"
        raise RuntimeError
    assert os.environ.get(NAME) == before
