"""An Adam that updates part of its parameters at a time gives the same bits in less memory."""

from typing import Any

import pytest
import torch

from mcore_rl.cpu.te_workalike import FusedAdam
from mcore_rl.device.training_patches import step_in_parts

BFLOAT16 = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}


def steps(adam: type[Any], **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Return parameters and optimizer after three steps over two groups."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(n, generator=generator, requires_grad=True) for n in (5, 3, 4, 9, 2)]
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.1}]
    optimizer = adam(groups, lr=0.1, **options)
    for step in range(3):
        for param in params:
            param.grad = torch.cos(step + param.detach())
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("options", [{}, BFLOAT16])
def test_values_and_steps_are_those_of_one_step(options: dict[str, Any]) -> None:
    whole, _ = steps(FusedAdam, **options)
    parts, optimizer = steps(step_in_parts(FusedAdam, most_elements=8), **options)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 2]
    assert all(
        state["exp_avg"].dtype == options.get("exp_avg_dtype", torch.float32)
        for state in optimizer.state.values()
    )


def test_no_part_is_larger_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    updated = []
    update = FusedAdam._update
    monkeypatch.setattr(
        FusedAdam,
        "_update",
        lambda self, params, group: (
            updated.append([len(param) for param in params]),
            update(self, params, group),
        ),
    )
    steps(step_in_parts(FusedAdam, most_elements=8), **BFLOAT16)
    assert updated == [[5, 3], [4], [9], [2]] * 3


def test_megatron_begins_a_state_without_saying_what_remains_of_weights() -> None:
    param = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    optimizer = step_in_parts(FusedAdam)([param], master_weights=True, **BFLOAT16)
    optimizer.initialize_state(param)
    assert optimizer.state[param]["master_param"].dtype == torch.float32


def test_a_state_that_is_handed_back_stays_where_it_is() -> None:
    _, optimizer = steps(step_in_parts(FusedAdam), **BFLOAT16)
    before = {id(value) for state in optimizer.state.values() for value in state.values()}
    handed = optimizer.state_dict()
    handed["param_groups"] = [{**group, "lr": 0.5, "step": 9} for group in handed["param_groups"]]
    optimizer.load_state_dict(handed)
    after = {id(value) for state in optimizer.state.values() for value in state.values()}
    assert after == before
    assert [(g["lr"], g["step"]) for g in optimizer.param_groups] == [(0.5, 9)] * 2


def test_another_state_is_copied() -> None:
    _, trained = steps(step_in_parts(FusedAdam), **BFLOAT16)
    _, other = steps(step_in_parts(FusedAdam), **BFLOAT16, betas=(0.5, 0.5))
    other.load_state_dict(trained.state_dict())
    for ours, theirs in zip(other.state.values(), trained.state.values(), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert all(ours[name] is not theirs[name] for name in theirs)
