"""FusedAdam computes what torch's Adam and AdamW do; its state has Transformer Engine's layout."""

from typing import Any

import pytest
import torch

from mcore_rl.cpu.te_workalike import FusedAdam

OPTIONS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def make_parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def train(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> None:
    for step in range(1, 4):
        for parameter in parameters:
            parameter.grad = torch.cos(step * parameter.detach())
        optimizer.step()


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_steps_are_those_of_torch(adam_w_mode: bool) -> None:
    ours, theirs = make_parameters(), make_parameters()
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    train(FusedAdam(ours, adam_w_mode=adam_w_mode, **OPTIONS), ours)
    train(kind(theirs, **OPTIONS), theirs)
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_the_step_is_in_the_group_and_the_moments_with_the_parameters() -> None:
    parameters = make_parameters()
    optimizer = FusedAdam(parameters, **OPTIONS)
    train(optimizer, parameters)
    assert optimizer.param_groups[0]["step"] == 3
    assert {frozenset(state) for state in optimizer.state.values()} == {
        frozenset({"exp_avg", "exp_avg_sq"})
    }


def test_moments_in_bfloat16_and_a_main_weight_beside_the_parameter() -> None:
    exact, rounded = make_parameters(), [p.detach().bfloat16() for p in make_parameters()]
    for parameter in rounded:
        parameter.requires_grad_()
    dtypes = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    optimizer = FusedAdam(
        rounded, master_weights=True, use_decoupled_grad=True, **dtypes, **OPTIONS
    )
    plain = FusedAdam(exact, **OPTIONS)
    for step in range(1, 4):
        for low, parameter in zip(rounded, exact, strict=True):
            low.decoupled_grad = torch.cos(step * parameter.detach())  # type: ignore[attr-defined]
            parameter.grad = low.decoupled_grad.clone()  # type: ignore[attr-defined]
        optimizer.step()
        plain.step()
    for low, parameter in zip(rounded, exact, strict=True):
        state = optimizer.state[low]
        assert {name: value.dtype for name, value in state.items()} == {
            "exp_avg": torch.bfloat16,
            "exp_avg_sq": torch.bfloat16,
            "master_param": torch.float32,
        }
        torch.testing.assert_close(state["master_param"], parameter.detach(), rtol=0.02, atol=0.02)
        assert torch.equal(low.detach(), state["master_param"].bfloat16())


def test_a_state_that_is_loaded_keeps_its_dtypes_and_values() -> None:
    parameters = [p.detach().bfloat16().requires_grad_() for p in make_parameters()]
    optimizer = FusedAdam(parameters, master_weights=True, use_decoupled_grad=True, **OPTIONS)
    for parameter in parameters:
        optimizer.initialize_state(parameter, False)
        optimizer.set_scaled_state(parameter, "master_param", torch.full(parameter.shape, 1.0001))
    other = FusedAdam(parameters, master_weights=True, use_decoupled_grad=True, **OPTIONS)
    other.load_state_dict(optimizer.state_dict())
    for parameter in parameters:
        got = other.get_unscaled_state(parameter, "master_param")
        assert torch.equal(got, torch.full(parameter.shape, 1.0001))


@pytest.mark.parametrize(
    "options", [{"store_param_remainders": True}, {"master_weight_dtype": torch.bfloat16}]
)
def test_main_weights_in_other_forms_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="main weights are whole, in float32"):
        FusedAdam(make_parameters(), **options)


def test_a_parameter_without_a_gradient_stays() -> None:
    parameters = make_parameters()
    before = parameters[1].detach().clone()
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer = FusedAdam(parameters, **OPTIONS)
    optimizer.step()
    assert torch.equal(parameters[1], before) and parameters[1] not in optimizer.state


def test_an_uncorrected_bias_is_refused() -> None:
    with pytest.raises(ValueError, match="bias_correction=False"):
        FusedAdam(make_parameters(), bias_correction=False)
