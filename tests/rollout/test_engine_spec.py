"""Sizes of an engine that do not fit are refused; its command line holds every choice."""

import pytest

from mcore_rl.rollout.engine_spec import (
    SHARE_PROMPTS,
    SHARE_PROMPTS_ON_CPU,
    UNCOMPILED,
    EngineAddress,
    EngineSpec,
)
from tests.support.engine_keys import KEYS


def test_a_spec_names_what_does_not_fit():
    with pytest.raises(ValueError, match="ep=2 does not divide tp=1"):
        EngineSpec("m", "l", ep=2)
    with pytest.raises(ValueError, match="num_nodes=2 needs dist_init_addr"):
        EngineSpec("m", "l", num_nodes=2)


def test_arguments_hold_every_choice():
    spec = EngineSpec(
        "model",
        "log",
        port=1234,
        tp=4,
        num_nodes=2,
        node_rank=1,
        dist_init_addr="a:1",
        max_running=12,
        deterministic=True,
        custom_weight_loaders=("a.b",),
        can_release_memory=True,
        trust_remote_code=True,
        extra_args=("--x", "y"),
    )
    line = " ".join(spec.arguments())
    for part in (
        "--model-path model",
        "--port 1234",
        "--tp-size 4",
        "--max-running-requests 12",
        "--max-mamba-cache-size 60",
        "--nnodes 2",
        "--node-rank 1",
        "--dist-init-addr a:1",
        "--enable-deterministic-inference",
        "--custom-weight-loader a.b",
        "--enable-memory-saver",
        "--trust-remote-code",
        "--x y",
    ):
        assert part in line


def test_the_server_is_told_its_gpus_before_sglangs_own_arguments():
    spec = EngineSpec("model", "log", port=1234, gpu_ids=("2", "3"))
    assert spec.arguments()[:3] == ["--gpu-ids", "2,3", "--model-path"]
    assert "--gpu-ids" not in EngineSpec("model", "log", port=1234).arguments()


def test_the_server_is_told_if_nothing_is_to_be_compiled() -> None:
    """By an argument, as kernels of a GPU need the compiler that the environment names."""
    spec = EngineSpec("model", "log", port=1234, gpu_ids=("2",), compiled=False)
    assert spec.arguments()[:4] == ["--gpu-ids", "2", UNCOMPILED, "--model-path"]
    assert UNCOMPILED not in EngineSpec("model", "log", port=1234).arguments()


def test_the_server_replaces_sglangs_admission_only_if_it_is_told_to() -> None:
    spec = EngineSpec("model", "log", port=1234, compiled=False, share_prompts=True)
    assert spec.arguments()[:3] == [UNCOMPILED, SHARE_PROMPTS, "--model-path"]
    assert SHARE_PROMPTS not in EngineSpec("model", "log", port=1234).arguments()
    undecided = EngineSpec("model", "log", port=1234, share_prompts=None).arguments()
    assert undecided[:2] == [SHARE_PROMPTS_ON_CPU, "--model-path"]


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "node3"])
def test_a_server_that_others_reach_needs_keys(host: str) -> None:
    with pytest.raises(ValueError, match=f"host={host}: a server without keys may listen on"):
        EngineSpec("m", "l", host=host)
    assert not EngineSpec("m", "l", host=host, keys=KEYS).is_local
    assert EngineSpec("m", "l").is_local


def test_keys_are_not_among_the_arguments() -> None:
    spec = EngineSpec("m", "l", port=1234, keys=KEYS)
    told = f"{spec} {spec.arguments()} {EngineAddress('http://a', 'l', KEYS)}"
    assert KEYS.user not in told and KEYS.admin not in told
