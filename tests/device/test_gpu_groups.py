"""The environment in which a communicator is made; tests/weight_sync tests communicators."""

import os
from types import SimpleNamespace

import pytest
from torch import distributed

from mcore_rl.device.gpu_groups import make_group

NAME = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Nccl:
    """Stands for torch's class, which CPU builds lack; it fails where NCCL would connect."""

    @staticmethod
    def Options() -> SimpleNamespace:
        return SimpleNamespace(config=SimpleNamespace())

    def __init__(self, *args: object) -> None:
        raise RuntimeError(f"made with {os.environ[NAME]}")


@pytest.mark.parametrize("before", [None, "", "1"])
def test_errors_are_left_to_callers_and_the_environment_is_as_before(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)
    with pytest.raises(RuntimeError, match="made with 0"):
        make_group(None, 0, 1)
    assert os.environ.get(NAME) == before
