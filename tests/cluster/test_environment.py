"""Workers get the controller's environment, and where theirs differs a warning says so."""

import logging
import os

import pytest

from mcore_rl.cluster.environment import (
    RAY_DEFAULTS,
    compare_environments,
    set_defaults,
    variables_for_workers,
)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_DEBUG", *RAY_DEFAULTS):
        monkeypatch.setenv(name, "before")  # restored after the test
        monkeypatch.delenv(name)


def test_what_the_caller_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    set_defaults()
    workers = variables_for_workers()
    assert workers["NCCL_CUMEM_ENABLE"] == "1" and workers["NCCL_DEBUG"] == "INFO"
    assert workers["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    assert "PATH" not in workers


def test_a_difference_is_told_once_with_who_has_it(caplog: pytest.LogCaptureFixture) -> None:
    set_defaults()
    remote = {**os.environ, "NCCL_DEBUG": "WARN"}
    with caplog.at_level(logging.WARNING):
        compare_environments({"rank 0": remote, "rank 1": remote, "rank 2": os.environ})
    assert caplog.messages == ["NCCL_DEBUG is 'WARN' instead of unset in rank 0 and 1 others"]


def test_what_must_agree_is_refused_with_a_remedy() -> None:
    set_defaults()
    remote = {**os.environ, "NCCL_CUMEM_ENABLE": "1"}
    with pytest.raises(
        ValueError,
        match=r"engine rank 2: NCCL_CUMEM_ENABLE is .1. instead of .0., .* unset it on that",
    ):
        compare_environments({"engine rank 2": remote})
