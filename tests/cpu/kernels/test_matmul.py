"""Products by OpenBLAS are those of torch, for every order of the factors in memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.cpu.kernels import matmul as matmul_module
from mcore_rl.cpu.kernels.matmul import linear, matmul


def stored_turned(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


@pytest.mark.parametrize("sizes", [(300, 33, 50), (257, 64, 128), (1, 5, 3), (0, 4, 4), (3, 4, 0)])
@pytest.mark.parametrize("is_turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_it_is_torchs(
    sizes: tuple[int, int, int],
    is_turned: tuple[bool, bool],
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    m, n, k = sizes
    a, b = torch.randn(m, k), torch.randn(k, n)
    a_stored, b_stored = (
        stored_turned(x) if turned else x for x, turned in zip((a, b), is_turned, strict=True)
    )
    expected = (a.double() @ b.double()).float()
    torch.testing.assert_close(matmul(a_stored, b_stored), expected)
    out = torch.full((m, n), 7.0)
    assert matmul(a_stored, b_stored, out) is out
    torch.testing.assert_close(out, expected)


def test_other_orders_and_precisions_go_to_torch() -> None:
    a, b = torch.randn(600, 40)[::2, ::2], torch.randn(20, 8)
    torch.testing.assert_close(matmul(a, b), a @ b)
    half = torch.randn(300, 20).bfloat16()
    assert torch.equal(matmul(half, b.bfloat16()), half @ b.bfloat16())


def test_without_openblas_it_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_module, "find_openblas", lambda: None)
    a, b = torch.randn(300, 20), torch.randn(20, 8)
    assert torch.equal(matmul(a, b), torch.mm(a, b))
    out = torch.empty(300, 8)
    assert matmul(a, b, out) is out and torch.equal(out, torch.mm(a, b))


@pytest.mark.parametrize("shape", [(300, 1, 24), (7, 24), (40, 10, 24)])
def test_linear_layers_have_torchs_gradients(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape), torch.randn(16, 24)
    dout = torch.randn(*shape[:-1], 16)
    results = []
    for function, dtype in ((linear, torch.float32), (F.linear, torch.float64)):
        leaves = [each.to(dtype, copy=True).requires_grad_() for each in (x, weight)]
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, dout.to(dtype))))
    for ours, exact in zip(*results, strict=True):
        assert (ours - exact).abs().max() <= 1e-6 * exact.abs().max()
