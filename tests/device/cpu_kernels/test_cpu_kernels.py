"""Compiled kernels take float32 on a CPU, with few threads, where there is a compiler."""

from collections.abc import Iterator

import pytest
import torch

from mcore_rl.device import cpu_kernels
from mcore_rl.device.cpu_kernels import MAX_THREADS, library, usable


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


def test_many_threads_are_better_used_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: MAX_THREADS + 1)
    assert not usable(torch.ones(2))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_computes() -> None:
    assert not usable(torch.ones(2))
    with pytest.raises(AssertionError, match=r"native/layers\.c was not compiled"):
        cpu_kernels.call("layers", "take_rows")
