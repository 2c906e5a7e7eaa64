"""An Adam that updates part of its parameters at a time gives the same bits in less memory."""

from typing import Any

import pytest
import torch

from mcore_rl.device.adam import FusedAdam
from mcore_rl.device.adam_in_parts import step_in_parts

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
