"""A loader that cannot be traced is told with its error, its line and its parameters' device."""

from pathlib import Path

import pytest
import torch

from mcore_rl.device import has_cuda
from mcore_rl.weights.layouts.engine_trace import trace_load_weights
from mcore_rl.weights.layouts.loader import UntraceableError, describe_loader_error


class LoadsByKernel(torch.nn.Module):
    """Its loader hands what it is given to a kernel, which wants memory on a GPU."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error
        self.param = torch.zeros(4, 4)

    def load_weights(self, weights):
        for _, loaded in weights:
            if self.error is not None:
                raise self.error
            self.param.copy_(loaded * 2)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("CUDA error: invalid argument"),
            "load_weights failed while tracing 'hf.w': RuntimeError: CUDA error: invalid argument;",
        ),
        (
            ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"),
            "load_weights failed while tracing 'hf.w': ValueError: Pointer argument (at 0) cannot",
        ),
        (
            None,
            "load_weights applies aten.mul.Tensor to 'hf.w', which cannot be traced;",
        ),
    ],
)
def test_a_loader_that_fails_is_told_with_its_error_the_device_and_its_line(
    error: Exception | None, message: str
) -> None:
    model = LoadsByKernel(error)
    wanted = {"hf.w": ((4, 4), torch.float32)}
    with pytest.raises(ValueError) as caught:
        trace_load_weights(model.load_weights, wanted, {"p.w": model.param})
    text = str(caught.value)
    assert text.startswith(message)
    assert f"; parameters on cpu, in load_weights ({__file__}:" in text
    line = int(text.rpartition(":")[2].rstrip(")"))
    found = Path(__file__).read_text().splitlines()[line - 1].strip()
    assert found == ("self.param.copy_(loaded * 2)" if error is None else "raise self.error")


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
def test_parameters_on_a_gpu_are_traced_and_named_when_that_fails() -> None:
    model = LoadsByKernel(None)
    model.param = model.param.cuda()
    with pytest.raises(ValueError, match=r"; parameters on cuda:0, in load_weights"):
        trace_load_weights(
            model.load_weights, {"hf.w": ((4, 4), torch.float32)}, {"p.w": model.param}
        )


def test_without_a_line_of_the_loader_the_rest_is_told() -> None:
    error = UntraceableError("load_weights copies 'w' to a tensor that is no parameter")
    text = describe_loader_error(error, "w", torch.device("cuda", 3))
    assert text == f"{error}; parameters on cuda:3"
