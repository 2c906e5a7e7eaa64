"""Compiled kernels take float32 on a CPU, where there is a compiler, on any number of threads."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from mcore_rl.cpu import kernels as cpu_kernels
from mcore_rl.cpu.kernels import is_parallel, library, usable
from mcore_rl.cpu.kernels.attention import causal_attention
from mcore_rl.cpu.kernels.layers import rms_norm, rotary, swiglu
from mcore_rl.cpu.kernels.matmul import add_rows, take_rows


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CC", "none")
    library.cache_clear()
    yield
    library.cache_clear()


def test_float32_on_a_cpu_is_taken() -> None:
    assert usable(torch.ones(2))
    assert not usable(torch.ones(2), torch.ones(2, dtype=torch.bfloat16))
    assert not usable(torch.ones(2, device="meta"))


def test_code_for_one_thread_leaves_others_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "is_parallel", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not usable(torch.ones(2))


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda x: rms_norm(x, x[0], 1e-6),
    "swiglu": lambda x: swiglu(x, x[:, :1].sigmoid()),
    "take": lambda x: take_rows(x, torch.arange(2 * len(x)) % len(x)),
    "add": lambda x: add_rows(x, torch.arange(len(x)) % 7, 7),
    "rotary": lambda x: turned(x.view(len(x), 4, -1)),
    "attention": lambda x: attended(x.view(len(x), -1, 32)),
}
"""Functions of [300, 512]."""


def attended(x: Tensor) -> Tensor:
    return causal_attention(x, x, x, (100, 1, 199), 0.2)


def turned(x: Tensor) -> Tensor:
    angles = torch.rand(len(x), 1, 1, x.shape[-1] // 2).repeat(1, 1, 1, 2)
    y = rotary(x, angles, (len(x),), 1.0, by_token=False)
    assert y is not None
    return y


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_number_of_threads_has_the_same_results(kernel: str) -> None:
    if not is_parallel():
        pytest.skip("needs GCC")
    torch.manual_seed(0)
    x, results = torch.randn(300, 512), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        y = KERNELS[kernel](leaf)
        results.append(
            (y, *torch.autograd.grad(y, [leaf], torch.linspace(-1, 1, y.numel()).view_as(y)))
        )
    for other in results[1:]:
        if kernel == "attention":  # its products are MKL's, whose bits vary with the threads
            torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-5)
        else:
            assert all(map(torch.equal, other, results[0]))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_computes() -> None:
    assert not usable(torch.ones(2))
    with pytest.raises(AssertionError, match=r"native/layers\.c was not compiled"):
        cpu_kernels.call("layers", "take_rows")
