"""Products of all experts at once are those of each expert, forward and backward."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.cpu.te_workalike import ColumnParallelGroupedLinear, RowParallelGroupedLinear
from mcore_rl.device import device, has_cuda
from mcore_rl.train.grouped_experts import (
    multiply_by_expert,
    view_as_one,
    with_grouped_products,
)

NUM_EXPERTS, INPUTS, OUTPUTS = 4, 16, 24
COUNTS = (5, 0, 1, 9)
DTYPES = [torch.float32, torch.bfloat16]


def find_ends(counts: Sequence[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0, dtype=torch.int32)


def make_weights(dtype: torch.dtype, joined: bool) -> list[Any]:
    """Return the experts' weights, in one storage with gaps between them or in several."""
    torch.manual_seed(1)
    padded = torch.randn(NUM_EXPERTS, OUTPUTS + 2, INPUTS, dtype=dtype)[:, :OUTPUTS]
    parts = padded.unbind() if joined else [part.clone() for part in padded]
    return [torch.nn.Parameter(part) for part in parts]


def multiply_one_by_one(rows: Tensor, weights: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    parts = zip(rows.split(list(counts)), weights, strict=True)
    return torch.cat([F.linear(part, weight) for part, weight in parts])


def differentiate(out: Tensor, rows: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    torch.manual_seed(2)
    loss = (out * torch.randn(out.shape).to(out.dtype)).sum()
    return list(torch.autograd.grad(loss, [rows, *weights]))


@pytest.mark.parametrize("counts", [COUNTS, (0, 0, 0, 15), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_and_gradients_are_those_of_each_expert(
    dtype: torch.dtype, joined: bool, counts: Sequence[int]
) -> None:
    weights = make_weights(dtype, joined)
    rows = torch.randn(sum(counts), INPUTS, dtype=dtype, requires_grad=True)
    out = multiply_by_expert(rows, weights, find_ends(counts))
    wanted = multiply_one_by_one(rows, weights, counts)
    torch.testing.assert_close(out, wanted)
    gradients = zip(
        differentiate(out, rows, weights), differentiate(wanted, rows, weights), strict=True
    )
    for got, want in gradients:
        torch.testing.assert_close(got, want)


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
def test_rows_of_any_number_are_multiplied_on_a_gpu() -> None:
    """No count is a multiple of 8, and torch wants none to be."""
    weights = [weight.detach().to(device()) for weight in make_weights(torch.bfloat16, True)]
    weights = [weight.requires_grad_() for weight in weights]
    rows = torch.randn(15, INPUTS, dtype=torch.bfloat16, device=device(), requires_grad=True)
    out = multiply_by_expert(rows, weights, find_ends(COUNTS).to(device()))
    wanted = multiply_one_by_one(rows, weights, COUNTS)
    torch.testing.assert_close(out, wanted)
    factors = torch.randn(out.shape, device=device()).bfloat16()
    got, want = (torch.autograd.grad((x * factors).sum(), [rows, *weights]) for x in (out, wanted))
    torch.testing.assert_close(got, want)


def test_frozen_weights_get_no_gradient() -> None:
    weights = [weight.requires_grad_(False) for weight in make_weights(torch.float32, True)]
    rows = torch.randn(15, INPUTS, requires_grad=True)
    multiply_by_expert(rows, weights, find_ends(COUNTS)).sum().backward()
    assert rows.grad is not None and all(weight.grad is None for weight in weights)


@pytest.mark.parametrize("joined", [True, False])
def test_gradients_are_added_to_sums_that_lie_side_by_side(joined: bool) -> None:
    """Sums that do not are left to megatron-core's hook, which adds the gradients it is given."""
    weights = make_weights(torch.bfloat16, True)
    sums = torch.ones(NUM_EXPERTS, OUTPUTS, INPUTS)
    for i, weight in enumerate(weights):
        weight.main_grad = sums[i] if joined else sums[i].clone()
        weight.grad_added_to_main_grad = False
    rows = torch.randn(15, INPUTS, dtype=torch.bfloat16, requires_grad=True)
    wanted = differentiate(multiply_one_by_one(rows, weights, COUNTS), rows, weights)[1:]
    out = multiply_by_expert(rows, weights, find_ends(COUNTS), adds=True)
    gradients = differentiate(out, rows, weights)[1:]
    for weight, gradient, want in zip(weights, gradients, wanted, strict=True):
        assert weight.grad_added_to_main_grad is joined
        torch.testing.assert_close(gradient, want)
        torch.testing.assert_close(weight.main_grad, 1 + want.float() if joined else sums[0])


def test_tensors_are_one_where_they_lie_at_equal_distances() -> None:
    whole = torch.arange(24.0).view(4, 3, 2)
    joined = view_as_one(whole[1::2].unbind())
    assert joined is not None and torch.equal(joined, whole[1::2])
    assert joined.data_ptr() == whole[1].data_ptr()
    assert view_as_one([whole[2]]) is not None
    assert view_as_one([whole[0], whole[1], whole[3]]) is None
    assert view_as_one([whole[1], whole[0]]) is None
    assert view_as_one([whole[0], whole[1].clone()]) is None
    assert view_as_one([whole[0].t(), whole[1].t()]) is None


@pytest.mark.parametrize("kind", [ColumnParallelGroupedLinear, RowParallelGroupedLinear])
def test_parameters_are_those_of_the_layer_that_it_is_made_from(kind: type) -> None:
    groups = SimpleNamespace(expt_tp=SimpleNamespace(size=lambda: 2, rank=lambda: 0))
    config = SimpleNamespace(
        params_dtype=torch.float32, perform_initialization=False, gradient_accumulation_fusion=False
    )
    options: dict[str, Any] = {"bias": False, "skip_bias_add": False, "pg_collection": groups}
    made = with_grouped_products(kind)
    assert with_grouped_products(made) is made
    plain: Any = kind(4, INPUTS, OUTPUTS, config=config, init_method=None, **options)
    grouped: Any = made(4, INPUTS, OUTPUTS, config=config, init_method=None, **options)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter)
    grouped.load_state_dict(plain.state_dict())
    own = dict(grouped.named_parameters())
    assert list(own) == ["weight3", "weight2", "weight1", "weight0"]
    for name, parameter in plain.named_parameters():
        assert own[name].partition_dim == parameter.partition_dim
        assert own[name].shape == parameter.shape
    rows = torch.randn(15, plain.weight0.shape[1])
    out, bias = grouped(rows, find_ends(COUNTS))
    torch.testing.assert_close(out, plain(rows, list(COUNTS))[0])
    assert bias is None
