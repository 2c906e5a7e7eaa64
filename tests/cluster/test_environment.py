"""Workers get the controller's environment, and where theirs differs a warning says so."""

import json
import logging
import os

import pytest
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

from mcore_rl.cluster.environment import (
    RAY_DEFAULTS,
    compare_environments,
    select_worker_variables,
    set_defaults,
    set_for_node,
)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MCORE_RL_SET_BY_NODE")
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_DEBUG", *own, *RAY_DEFAULTS):
        monkeypatch.setenv(name, "before")  # restored after the test
        monkeypatch.delenv(name)


def test_what_the_caller_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    set_defaults()
    workers = select_worker_variables()
    assert workers["NCCL_CUMEM_ENABLE"] == "1" and workers["NCCL_DEBUG"] == "INFO"
    assert workers["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    assert "PATH" not in workers


def test_variables_of_a_ray_job_are_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    set_defaults()
    for described in ({"runtime_env": {}}, {"runtime_env": {"working_dir": "/w"}}):
        monkeypatch.setenv(RAY_JOB_CONFIG_JSON_ENV_VAR, json.dumps(described))
        assert select_worker_variables()["NCCL_DEBUG"] == "INFO"
    described = {"runtime_env": {"env_vars": {"NCCL_DEBUG": "INFO"}}}
    monkeypatch.setenv(RAY_JOB_CONFIG_JSON_ENV_VAR, json.dumps(described))
    assert "NCCL_DEBUG" not in select_worker_variables()
    assert select_worker_variables()["RAY_DEBUG"] == "legacy"


def test_what_a_node_found_for_itself_stays_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_defaults()
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    set_for_node({"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"})
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    workers = select_worker_variables()
    assert workers["NCCL_SOCKET_IFNAME"] == "ib0", "the user's own choice goes everywhere"
    assert "GLOO_SOCKET_IFNAME" not in workers
    with caplog.at_level(logging.WARNING):
        compare_environments({"rank 1": {**os.environ, "GLOO_SOCKET_IFNAME": "ens5"}})
    assert not caplog.messages


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
