"""Staging: the parameters keep their values until the swap, and the swap is all or nothing."""

import pytest
import torch
from torch import nn

from mcore_rl.weight_sync.staging import Staging
from mcore_rl.weight_sync.waits import TransferError


def make_parameters() -> dict[str, nn.Parameter]:
    """One parameter in memory of its own, two that share theirs."""
    shared = torch.arange(8.0)
    views = {"left": shared[:4], "right": shared[4:]}
    own = {"alone": torch.arange(4.0), **views}
    return {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in own.items()}


def test_staged_values_show_after_the_swap_and_both_memories_are_used_in_turns() -> None:
    parameters = make_parameters()
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    staging = Staging(parameters)
    pointers = {parameters["alone"].data_ptr(), staging.tensors["alone"].data_ptr()}
    shared = parameters["left"].data_ptr()
    staging.finish(parameters)
    for version in range(1, 4):
        for tensor in staging.tensors.values():
            tensor.fill_(version)
        assert all(torch.equal(parameters[name], before[name]) for name in parameters)
        staging.version = version
        staging.swap(version, parameters)
        before = {name: torch.full((4,), float(version)) for name in parameters}
        assert all(torch.equal(parameters[name], before[name]) for name in parameters)
        assert {parameters["alone"].data_ptr(), staging.tensors["alone"].data_ptr()} == pointers
        assert parameters["left"].data_ptr() == shared, (
            "memory shared with others stays where it is"
        )


@pytest.mark.parametrize("staged", [None, 2])
def test_only_the_version_that_is_staged_whole_can_be_swapped_in(staged: int | None) -> None:
    parameters = make_parameters()
    staging = Staging(parameters)
    staging.tensors["alone"].fill_(7)
    staging.version = staged
    with pytest.raises(
        TransferError, match=f"version 3 is to be swapped in, but {staged} is staged"
    ):
        staging.swap(3, parameters)
    assert torch.equal(parameters["alone"], torch.arange(4.0))


def test_both_sets_lie_in_segments_and_parameters_that_share_memory_stay() -> None:
    parameters = make_parameters()
    left = parameters["left"].data_ptr()
    staging = Staging(parameters)
    assert staging.segments is not None
    live, staged = staging.segments
    assert live.holds(parameters["alone"]) and not live.holds(parameters["left"])
    assert parameters["left"].data_ptr() == left
    assert all(staged.holds(tensor) for tensor in staging.tensors.values())
    assert parameters["alone"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_next_staging_takes_over_the_live_segment_and_never_the_other_one() -> None:
    parameters = make_parameters()
    first = Staging(parameters)
    first.version = 1
    first.swap(1, parameters)
    assert first.segments is not None
    live = first.find_live_segment(parameters)
    assert live is first.segments[1], "after a swap the second set is in use"
    address = parameters["alone"].data_ptr()
    second = Staging(parameters, live)
    assert second.segments is not None and second.segments[0] is live
    assert parameters["alone"].data_ptr() == address
    assert second.segments[1] not in first.segments, "ranks of a failed link may write to them"
    parameters["alone"].data = torch.zeros(4)
    assert second.find_live_segment(parameters) is None


def test_the_second_set_starts_with_the_parameters_values_and_what_changed_since() -> None:
    parameters = make_parameters()
    staging = Staging(parameters)
    parameters["alone"].data[1] = 9.0
    staging.finish(parameters, changed=["alone"])
    assert all(torch.equal(staging.tensors[name], parameters[name]) for name in parameters)
