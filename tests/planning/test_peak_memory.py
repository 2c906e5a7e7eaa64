"""The fullest moment of GPUs that several processes share."""

import pytest

from mcore_rl.config import ParallelConfig
from mcore_rl.planning.peak_memory import Uses, find_peaks

TRAINER: Uses = {
    "weights": 10,
    "gradients": 20,
    "optimizer": 30,
    "activations": 5,
    "sync buffers": 1,
}
ENGINE: Uses = {"weights": 10, "KV cache": 50, "sync buffers": 1}


def moment_of(offload: bool, engine: Uses = ENGINE, **more: object) -> tuple[str, float, int]:
    critic: list[Uses] = more.get("critic", [])  # type: ignore[assignment]
    served: Uses = more.get("served", {})  # type: ignore[assignment]
    [rank] = find_peaks(ParallelConfig(), offload, [TRAINER], critic, [engine], served)
    return rank.moment, rank.num_bytes, rank.num_processes


@pytest.mark.parametrize(
    ("offload", "engine", "expected"),
    [
        (True, ENGINE, ("train step", 66 + 1, 2)),
        (True, ENGINE | {"CUDA graphs": 3, "sync communicators": 2}, ("train step", 66 + 6, 2)),
        (False, ENGINE, ("generation", 60 + 1 + 61, 2)),
        (True, ENGINE | {"KV cache": 60}, ("generation", 1 + 71, 2)),
        (True, {"weights": 60, "KV cache": 0}, ("weight sync", 10 + 1 + 60, 2)),
        (True, {"weights": 50, "linear attention": 20}, ("generation", 1 + 70, 2)),
        (True, {"weights": 62, "linear attention": 8}, ("weight sync", 10 + 1 + 62, 2)),
    ],
)
def test_the_fullest_moment_counts_what_nobody_has_released(
    offload: bool, engine: Uses, expected: tuple[str, float, int]
) -> None:
    assert moment_of(offload, engine) == expected


def test_a_critic_and_a_served_model_have_moments_of_their_own() -> None:
    critic = [{"weights": 10.0}, {"weights": 10.0, "activations": 90.0}]
    assert moment_of(True, critic=critic) == ("critic's train step", 102, 3)
    assert moment_of(True, served={"judge": 80}) == ("scoring", 92, 3)
