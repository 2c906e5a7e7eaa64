"""Arguments and cores of an engine without CUDA."""

import os

import pytest
import torch

from mcore_rl.device.sglang_setup import (
    CPU_ARGUMENTS,
    CPU_FLAGS,
    cpu_arguments,
    rank_cpus,
    use_gpus,
)


def value_of(arguments: list[str], name: str) -> str:
    assert arguments.count(name) == 1, arguments
    return arguments[arguments.index(name) + 1]


def test_a_cpus_arguments_are_added() -> None:
    arguments = cpu_arguments(["--model-path", "model", "--enable-memory-saver", "--tp-size", "2"])
    assert arguments[:4] == ["--model-path", "model", "--tp-size", "2"]
    assert {name: value_of(arguments, name) for name in CPU_ARGUMENTS} == CPU_ARGUMENTS
    assert arguments[-len(CPU_FLAGS) :] == list(CPU_FLAGS)


def test_an_option_that_is_given_keeps_its_value() -> None:
    arguments = cpu_arguments(["--mem-fraction-static", "0.5", CPU_FLAGS[0]])
    assert value_of(arguments, "--mem-fraction-static") == "0.5"
    assert all(arguments.count(flag) == 1 for flag in CPU_FLAGS)


@pytest.mark.parametrize(
    ("num_ranks", "cpus", "wanted"),
    [
        (2, [0, 1, 2, 3], "0,1|2,3"),
        (2, [4, 6, 8], "4|6"),
        (3, [5, 7], "5|7|5"),
        (1, [0, 1], "0,1"),
    ],
)
def test_ranks_share_the_cores(num_ranks: int, cpus: list[int], wanted: str) -> None:
    assert rank_cpus(num_ranks, cpus) == wanted


@pytest.mark.parametrize(
    ("gpu_ids", "visible", "added", "seen_after"),
    [
        (("4", "5"), None, ["--base-gpu-id", "4"], None),
        (("5", "4"), None, ["--base-gpu-id", "4"], None),
        (("6", "7"), "4,5,6,7", ["--base-gpu-id", "2"], "4,5,6,7"),
        (("1", "3"), None, [], "1,3,0,2,4,5,6,7"),
        (("7", "4"), "7,6,5,4", [], "7,4,6,5"),
        (("GPU-b", "GPU-a"), "GPU-x,GPU-b,GPU-a", ["--base-gpu-id", "1"], "GPU-x,GPU-b,GPU-a"),
        (("GPU-a", "GPU-x"), "GPU-x,GPU-b,GPU-a", [], "GPU-x,GPU-a,GPU-b"),
        ((), "0", [], "0"),
    ],
)
def test_a_server_sees_the_whole_machine_and_its_own_gpus_first_if_they_have_gaps(
    gpu_ids: tuple[str, ...],
    visible: str | None,
    added: list[str],
    seen_after: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")  # so that it is restored afterwards
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert use_gpus(["--tp-size", "2"], gpu_ids) == ["--tp-size", "2", *added]
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen_after
