"""Lion's steps are those of its definition, and its state goes to any other layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config import ModelConfig, OptimizerConfig
from tests.support.distributed import run_each, run_ranks
from tests.support.gradients import whole_gradients
from tests.support.optimizer_layouts import name_of, read, resume, take_steps
from tests.support.tiny_training import write_hf_model

LR = 1e-3
LION = OptimizerConfig(name="lion", lr=LR, beta1=0.9, beta2=0.99, clip_grad=0.0)
LAYOUTS: list[dict[str, Any]] = [{"dp": 2, "ep": 1}, {"tp": 2, "ep": 2}]


def share_of_other_signs(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the share of weights that took another step; the others agree within rounding."""
    assert got.keys() == wanted.keys()
    differs = torch.cat([(got[n] - wanted[n]).abs().flatten() > LR / 2 for n in wanted])
    for name, value in wanted.items():
        difference = (got[name] - value).abs()
        assert difference[difference <= LR / 2].max() <= 1e-6, name
    return float(differs.double().mean())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(path=str(write_hf_model(tmp_path_factory.mktemp("lion") / "model")))


@pytest.fixture(scope="module")
def one_process(model: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    root = tmp_path_factory.mktemp("steps")
    return root, run_ranks(take_steps, 1, model, root, LION, {})[0]


def test_a_first_step_has_the_size_of_the_learning_rate_and_the_sign_of_the_gradient(
    model: ModelConfig, one_process: tuple[Path, Any]
) -> None:
    root, (boxed, _) = one_process
    gradients, before = whole_gradients(boxed), read(Path(model.path))
    after = read(root / "one" / "first")
    for name, gradient in gradients.items():
        wanted = -LR * gradient.sign()
        torch.testing.assert_close(after[name] - before[name], wanted, rtol=0, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.gloo
def test_layouts_agree_with_one_process_and_resume_in_each_other(
    model: ModelConfig, one_process: tuple[Path, Any]
) -> None:
    """The sign of a mean near 0 may differ by rounding: of few weights."""
    root, _ = one_process
    last = read(root / "one" / "last")
    run_each(take_steps, 2, LAYOUTS, model, root, LION)
    for layout in LAYOUTS:
        assert share_of_other_signs(read(root / name_of(layout) / "last"), last) < 1e-3, layout
    run_ranks(resume, 1, model, root, LION, {}, "tp2_ep2")
    run_ranks(resume, 2, model, root, LION, {"dp": 2, "ep": 1}, "tp2_ep2")
    for name in ("tp2_ep2_in_one", "tp2_ep2_in_dp2_ep1"):
        assert share_of_other_signs(read(root / name), last) < 1e-3, name
