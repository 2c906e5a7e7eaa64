"""Without CUDA every question about the device has the CPU's answer."""

import subprocess
import sys

import pytest
import torch

from mcore_rl import device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_the_device_is_the_cpu_and_talks_over_gloo() -> None:
    assert not device.has_cuda()
    assert device.device() == torch.device("cpu")
    assert device.dist_backend() == "gloo"
    on = {name for name, value in device.megatron_options().items() if value}
    assert on == {"bias_activation_fusion"}


def test_with_fused_kernels_gradients_are_added_where_they_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    assert device.megatron_options()["gradient_accumulation_fusion"] is True
    monkeypatch.setattr(device.IN_PLACE, "torch_modules", True)
    assert device.megatron_options()["gradient_accumulation_fusion"] is False


def test_host_memory_is_not_pinned() -> None:
    memory = device.host_memory(24)
    assert memory.shape == (24,) and memory.dtype == torch.uint8 and not memory.is_pinned()


def test_compile_leaves_functions_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", torch.compile)  # restored after the test
    monkeypatch.setattr(torch.compiler, "disable", torch.compiler.disable)
    device.leave_compiler_out()

    def double(number: int) -> int:
        return 2 * number

    assert torch.compile(double) is double
    assert torch.compile(dynamic=True)(double) is double


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "pinned_max_round_threshold_mb:64"}),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True,pinned_max_round_threshold_mb:64"},
        ),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "pinned_max_round_threshold_mb:8"},
            {"PYTORCH_CUDA_ALLOC_CONF": "pinned_max_round_threshold_mb:8"},
        ),
    ],
)
def test_large_pinned_blocks_keep_their_size_and_settings_stay(
    before: dict[str, str], after: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    assert device.exact_pinning(before) == after


@pytest.mark.parametrize(
    ("version", "knows_it"),
    [
        ("2.9.1", False),
        ("2.11.0+cu130", False),
        ("2.12.1", False),
        ("2.13.0a0+git1234567", True),
        ("2.14.1+cu130", True),
        ("3.0.0", True),
    ],
)
def test_a_torch_that_does_not_know_the_threshold_is_not_given_it(
    version: str, knows_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    expected = {"PYTORCH_CUDA_ALLOC_CONF": "pinned_max_round_threshold_mb:64"} if knows_it else {}
    assert device.exact_pinning({}) == expected
    assert device.can_pin_exactly() is knows_it


@pytest.mark.slow
def test_an_optimizer_imports_no_compiler() -> None:
    """Fails in its second half once torch's optimizers do not ask for the compiler."""
    train = (
        "p = torch.nn.Parameter(torch.ones(3))\n"
        "o = torch.optim.Optimizer([p], {})\n"
        "o.zero_grad(); o.load_state_dict(o.state_dict())\n"
        "torch.compiler.disable(lambda: None)\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    leave = "from mcore_rl.device import leave_compiler_out\nleave_compiler_out()\n"
    imported = [
        subprocess.run(
            [sys.executable, "-c", f"import sys, torch\n{before}{train}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for before in (leave, "")
    ]
    assert imported == ["False", "True"]
