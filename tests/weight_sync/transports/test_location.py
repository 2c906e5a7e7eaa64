"""The route between two ranks, and which ranks make a gloo group."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weight_sync.roster import RankLocation, Route, choose_route, needs_gloo

HOST_A, HOST_B = RankLocation("a"), RankLocation("b")
GPU_A0 = RankLocation("a", "gpu-a0", ("gpu-a0", "gpu-a1"))
GPU_A1 = RankLocation("a", "gpu-a1", ("gpu-a1", "gpu-a0"))
ALONE_A2 = RankLocation("a", "gpu-a2", ("gpu-a2",))
GPU_B0 = RankLocation("b", "gpu-b0", ("gpu-b0",))
LOCATIONS = (HOST_A, HOST_B, GPU_A0, GPU_A1, ALONE_A2, GPU_B0)


@pytest.mark.parametrize(
    ("sender", "receiver", "route"),
    [
        (HOST_A, HOST_A, "shared memory"),
        (HOST_A, HOST_B, "gloo"),
        (GPU_A0, GPU_A0, "shared GPU memory"),
        (GPU_A0, GPU_A1, "shared GPU memory"),
        (GPU_A0, ALONE_A2, "NCCL"),
        (ALONE_A2, GPU_A0, "NCCL"),
        (GPU_A0, GPU_B0, "NCCL"),
        (GPU_A0, HOST_A, "shared memory"),
        (HOST_A, GPU_A0, "shared memory"),
        (GPU_A0, HOST_B, "gloo"),
        (HOST_B, GPU_A0, "gloo"),
    ],
)
def test_the_route_follows_from_both_locations(
    sender: RankLocation, receiver: RankLocation, route: Route
) -> None:
    assert choose_route(sender, receiver) == route


def test_only_the_receiver_needs_to_read_the_other_gpu() -> None:
    sees_all = RankLocation("a", "gpu-a3", ("gpu-a3", "gpu-a2"))
    assert choose_route(ALONE_A2, sees_all) == "shared GPU memory"
    assert choose_route(sees_all, ALONE_A2) == "NCCL"


some_locations = st.lists(st.sampled_from(LOCATIONS), min_size=1, max_size=4)


@given(senders=some_locations, receivers=some_locations)
def test_ranks_make_a_gloo_group_exactly_if_a_pair_uses_it(
    senders: list[RankLocation], receivers: list[RankLocation]
) -> None:
    routes = {choose_route(sender, receiver) for sender, receiver in product(senders, receivers)}
    assert needs_gloo(senders, receivers) == ("gloo" in routes)
